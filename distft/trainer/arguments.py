"""What the arguments of a training run mean under a strategy, and which contradict it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distft.checkpoint.pretrained import loaded_by
from distft.expert_lora import check_dropout
from distft.strategies.base import Strategy
from distft.strategies.by_name import strategy as by_name

if TYPE_CHECKING:
    from trl.trainer.sft_config import SFTConfig

logger = logging.getLogger("distft")

# Arguments that say how a model is spread or computed, which the strategy says here; what to do.
REFUSED: Mapping[str, str] = {
    "fsdp": "Leave it out and pass strategy='fsdp2'",
    "deepspeed": "Leave it out and pass strategy='zero1', 'zero2' or 'zero3'",
    "parallelism_config": "Leave it out and pass a strategy with these degrees",
    "fp16": "Use bf16=True: fp16 needs loss scaling, which the strategies do not share",
    "fp16_full_eval": "Leave it out: sharded weights stay in the dtype of training",
    "bf16_full_eval": "Leave it out: sharded weights stay in the dtype of training",
    "torch_compile": "Leave it out and pass a strategy with compile='block'",
    "auto_find_batch_size": "Set per_device_train_batch_size; distft.plan says what fits",
    "ddp_find_unused_parameters": "Leave it out and pass DDP(find_unused_parameters=True)",
    "ddp_bucket_cap_mb": "Leave it out: the buckets are torch's own",
    "ddp_broadcast_buffers": "Leave it out: buffers are rank 0's from the beginning",
    "ddp_static_graph": "Leave it out: accumulation changes the graph of a step",
    "ddp_backend": "Leave it out: distft.init(backend=...) starts the group",
    "push_to_hub": "Call trainer.push_to_hub() after trainer.train()",
    "activation_offloading": "Leave it out, or use a strategy with offload",
    "save_on_each_node": "Leave it out: a checkpoint is one folder that all ranks share",
    "save_only_model": "Leave it out: distft.consolidate() takes the model out of a checkpoint",
}
# Of the configuration of Accelerate.
_REFUSED_OF_ACCELERATE: Mapping[str, str] = {
    "split_batches": "per_device_train_batch_size is the batch of one data rank",
    "dispatch_batches": "every data rank reads its own rows",
}


def check_arguments(args: SFTConfig) -> None:
    """Raise where arguments say what a strategy says, or what no strategy does.

    Raises:
        ValueError: Which, its value, and what to write in its place.

    Collective: none.
    """
    for name, way_out in REFUSED.items():
        value = getattr(args, name, None)
        # A field that says False for a strategy's own default contradicts nothing.
        if value not in (None, False, "", [], {}):
            raise ValueError(f"distft.Trainer(args={name}={value!r}) beside a strategy: {way_out}.")
    for name, reason in _REFUSED_OF_ACCELERATE.items():
        if getattr(args.accelerator_config, name, None):
            raise ValueError(
                f"distft.Trainer(args=accelerator_config {name}=True): {reason}. Leave it out."
            )
    if not getattr(args.accelerator_config, "use_seedable_sampler", True):
        raise ValueError(
            "distft.Trainer(args=accelerator_config use_seedable_sampler=False): each start would "
            "draw 1 order of its own, and no run could go on with the rest of another. Leave it "
            "out."
        )
    if not args.average_tokens_across_devices:
        raise ValueError(
            "distft.Trainer(args=average_tokens_across_devices=False) would be a mean of the "
            "ranks' means, not the mean over all loss tokens. Leave it at True."
        )
    if args.train_sampling_strategy == "batch_rebalance":
        raise ValueError(
            "distft.Trainer(args=train_sampling_strategy='batch_rebalance') deals rows to "
            "processes, and 1 row may be several processes' here. Use 'random' or "
            "'group_by_length'."
        )
    kwargs: Any = args.activation_checkpointing_kwargs or {}
    if kwargs.get("use_reentrant"):
        raise ValueError(
            "distft.Trainer(args=activation_checkpointing_kwargs={'use_reentrant': True}) loses "
            "hooks of sharded blocks. Leave it out."
        )


def check_kind(args: Any, others: Mapping[str, Any]) -> None:
    """Raise where arguments are another trainer's.

    Args:
        args: The training arguments.
        others: The arguments by name that go on to `SFTTrainer`.

    Raises:
        ValueError: A configuration, an argument or a dataset of DPO or of another trainer.

    Collective: none.
    """
    import inspect

    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    if not isinstance(args, SFTConfig):
        raise ValueError(
            f"distft.Trainer(args=...) got a {type(args).__name__}, and trains as TRL's SFTTrainer "
            "does. Pass an SFTConfig."
        )
    known = list(inspect.signature(SFTTrainer.__init__).parameters)[1:]
    unknown = [name for name in others if name not in known]
    if unknown:
        raise ValueError(
            f"distft.Trainer has no argument {', '.join(unknown)} among SFTTrainer's {len(known)}: "
            f"{', '.join(known)}. Another trainer's are not known here; leave them out."
        )
    columns = getattr(others.get("train_dataset"), "column_names", None) or ()
    if {"chosen", "rejected"} <= set(columns):
        raise ValueError(
            f"distft.Trainer(train_dataset=...) has the columns {', '.join(columns)}, pairs to "
            "prefer one of, as DPO has them. Keep the answers to be learned in 1 column: "
            "messages, or prompt and completion."
        )


def check_rows(dataset: Any, given: Any) -> None:
    """Raise where a dataset has nothing to learn left once it is prepared.

    Args:
        dataset: The prepared dataset.
        given: What was passed.

    Raises:
        ValueError: No row has a loss token.

    Collective: none.
    """
    if hasattr(dataset, "__len__") and not len(dataset):
        raise ValueError(
            f"distft.Trainer(train_dataset=...) has 0 loss tokens in its {len(given)} rows: each "
            "is masked, or empty once cut to max_length. Mask fewer tokens, or cut at more."
        )


def strategy_of(strategy: str | Strategy, args: SFTConfig) -> Strategy:
    """Return the strategy with what the arguments say of precision and checkpointing.

    By name it computes as ``bf16`` says: "bf16-mixed" or "fp32". An instance has a precision of its
    own, which holds. ``activation_checkpointing`` of either turns it on.

    Raises:
        ValueError: There is no strategy of that name, or it is none.

    Collective: none.
    """
    if isinstance(strategy, str):
        found = by_name(strategy, precision="bf16-mixed" if args.bf16 else "fp32")
    elif isinstance(strategy, Strategy):
        found = strategy
    else:
        raise ValueError(
            f"distft.Trainer(strategy={strategy!r}) is a {type(strategy).__name__}. Pass a name "
            "such as 'fsdp2', or an instance such as distft.FSDP2()."
        )
    if args.bf16 != (found.precision != "fp32"):
        logger.info("%r computes in %s; bf16=%s is set to it.", found, found.precision, args.bf16)
    if args.activation_checkpointing and not found.activation_checkpointing:
        found = replace(found, activation_checkpointing=True)
    return found


def check_objects(optimizers: tuple[Any, Any], model: Any, peft_config: Any) -> None:
    """Raise where objects were built that sharding would leave behind.

    Raises:
        ValueError: An optimizer or scheduler that is there already, adapters on a model that is
            spread, or dropout on adapters of parameters.

    Collective: none.
    """
    there = [type(each).__name__ for each in optimizers if each is not None]
    if there:
        raise ValueError(
            f"distft.Trainer(optimizers=...) got {' and '.join(there)}, built before the model is "
            "sharded: it would train tensors that are gone. Pass "
            "optimizer_cls_and_kwargs=(AdamW, {'lr': 1e-4}) and lr_scheduler_type."
        )
    check_dropout(
        getattr(peft_config, "target_parameters", None), getattr(peft_config, "lora_dropout", None)
    )
    if peft_config is not None and loaded_by(model) is not None:
        raise ValueError(
            "distft.Trainer(peft_config=...) got a model that load_model() has spread already: "
            "adapters on it would be trained by 1 rank each. Pass peft_config to load_model()."
        )
