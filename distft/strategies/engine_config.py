"""DeepSpeed's configuration of a strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distft.process_group import local_device

if TYPE_CHECKING:
    from distft.strategies.zero import ZeRO


def engine_config(strategy: ZeRO) -> dict[str, Any]:
    """Return DeepSpeed's configuration; a default that changes training is written out.

    Collective: none.
    """
    reduce_dtype = "bf16" if strategy.precision == "bf16" else "fp32"
    return {
        # Accumulation is ours: the engine sees every step as one micro-step of its own, and
        # `no_sync` tells it where the boundary is.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # Its default is 1.0. The norm is ours and applied before its step.
        "gradient_clipping": 0.0,
        "prescale_gradients": False,
        # A sum over ranks, not a mean: shares are over the global number of loss tokens
        # already. Stage 3 refuses this setting; `engine.sum_gradients` does it there.
        "gradient_allreduce_op": "mean" if strategy.stage == 3 else "sum",
        "communication_data_type": reduce_dtype,
        "data_types": {"grad_accum_dtype": reduce_dtype},
        "bf16": {
            "enabled": strategy.precision != "fp32",
            "bf16_master_weights_and_grads": strategy.precision == "bf16",
            "bf16_optimizer_states": strategy.precision == "bf16",
            "check_grad_overflow": True,
        },
        # Which optimizers are right under sharding is checked by `check_factory`.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**62,
        "zero_optimization": {
            "stage": strategy.stage,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "overlap_comm": local_device().type == "cuda",
            "reduce_bucket_size": strategy.reduce_bucket_size,
            "allgather_bucket_size": strategy.allgather_bucket_size,
            **strategy._stage_config(),
            **strategy._offload_config(),
        },
    }
