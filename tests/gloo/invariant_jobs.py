"""Plain loops with a fault planted in each, and without one, for the tests of invariants."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

import distft
from distft import DDP, FSDP2, TP, ZeRO1
from distft.process_group import group_rank
from distft.testing import tiny_batches, tiny_config, tiny_model

STEPS = 3
Hook = Callable[..., None]


def nothing(*_: Any) -> None:
    """Change nothing."""


def rows_of(strategy: Any, step: int, size: int = 1) -> list[dict[str, Any]]:
    """Return this rank's batches of a step, unlike in their numbers of loss tokens."""
    tokens = [3, 11, 7, 2, 5, 9, 4, 8][: strategy.dp_size * size]
    return tiny_batches(tokens, seed=step)[strategy.dp_rank :: strategy.dp_size]


def built(strategy: Any, model: str = "L", lora: Any = None, **config: Any) -> tuple[Any, Any]:
    """Return a tiny model under a strategy, and its optimizer."""
    distft.init(seed=0)
    whole = tiny_model(model)
    if config:
        changed = tiny_config(model)
        for name, value in config.items():
            setattr(changed, name, value)
        torch.manual_seed(0)
        whole = type(whole)(changed)
    whole.train()
    return strategy.apply(whole, partial(AdamW, lr=1e-3), peft_config=lora)


def steps(
    strategy: Any,
    model: Any,
    optimizer: Any,
    before: Hook = nothing,
    after: Hook = nothing,
    batches: Callable[..., Any] = rows_of,
    number: int = STEPS,
) -> Any:
    """Make steps with invariants looked at in each; ``before`` and ``after`` run beside each."""
    with distft.hold_invariants(strategy, model, optimizer, every=1) as held:
        for step in range(number):
            before(step, model, optimizer)
            strategy.train_step(model, optimizer, batches(strategy, step))
            after(step, model, optimizer)
    return held


def by_hand(
    strategy: Any,
    model: Any,
    optimizer: Any,
    share: Callable[..., Any],
    before_update: Hook = nothing,
    skips: Callable[[int, int], bool] = lambda step, micro: False,
    never_sync: bool = False,
) -> None:
    """Make steps of two micro-batches with a loop of one's own."""
    with distft.hold_invariants(strategy, model, optimizer, every=1):
        for step in range(STEPS):
            batches = rows_of(strategy, step, 2)
            count = strategy.count_loss_tokens(batches)
            optimizer.zero_grad()
            for micro, batch in enumerate(batches):
                if skips(step, micro):
                    continue
                if micro == 0 or never_sync:
                    with strategy.no_sync(model):
                        strategy.backward(share(model, batch, count))
                else:
                    strategy.backward(share(model, batch, count))
            before_update(step, model, optimizer)
            optimizer.step()


def right_share(model: Any, batch: Any, count: int) -> Any:
    """Return this batch's share of the mean over all loss tokens."""
    return model(**batch, num_items_in_batch=count).loss


def stale_buffer() -> None:
    """Rank 1 has another rotary table."""

    def spoil(step: int, model: Any, _: Any) -> None:
        if step == 1 and group_rank() == 1:
            distft.unwrap(model).model.rotary_emb.inv_freq.mul_(1.01)

    steps(DDP(), *built(DDP()), before=spoil)


def gradients_not_summed() -> None:
    """The last micro-step is inside no_sync too."""
    by_hand(DDP(), *built(DDP()), share=right_share, never_sync=True)


def replicated_gradient_differs() -> None:
    """A norm, whole on each rank of a tp group, has another gradient on one."""
    strategy = TP(tp=2)

    def spoil(step: int, model: Any, _: Any) -> None:
        if group_rank() == 1:
            model.model.norm.weight.grad.mul_(2)

    by_hand(strategy, *built(strategy), share=right_share, before_update=spoil)


def moments_in_bf16() -> None:
    """Moments are cast to save memory."""

    def spoil(step: int, _: Any, optimizer: Any) -> None:
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].bfloat16()

    # Adam in one operation refuses them; its loop does not.
    strategy = DDP()
    model, optimizer = built(strategy)
    optimizer.param_groups[0]["foreach"] = False
    steps(strategy, model, optimizer, after=spoil)


def weights_in_bf16() -> None:
    """A weight is cast after apply."""
    strategy = DDP()
    model, optimizer = built(strategy)
    norm = distft.unwrap(model).model.norm.weight
    norm.data = norm.data.bfloat16()
    steps(strategy, model, optimizer)


def tp_rows_differ() -> None:
    """From the second step on the ranks of a tp group read other rows."""

    def rows(strategy: Any, step: int) -> Any:
        return tiny_batches([5], seed=step + 10 * step * group_rank())

    steps(TP(tp=2), *built(TP(tp=2)), batches=rows)


def one_rank_skips_a_batch() -> None:
    """Rank 1 leaves out the first micro-batch of the second step."""
    by_hand(
        DDP(),
        *built(DDP()),
        share=right_share,
        skips=lambda step, micro: group_rank() == 1 and step == 1 and micro == 0,
    )


def lora_after_sharding() -> None:
    """Adapters go on a model that is sharded, with an optimizer of their own."""
    strategy = FSDP2()
    model, _ = built(strategy)
    torch.manual_seed(0)
    for layer in model.model.layers:
        query = layer.self_attn.q_proj
        query.lora_A, query.lora_B = nn.Linear(32, 2, bias=False), nn.Linear(2, 32, bias=False)
        query.register_forward_hook(lambda m, given, out: out + m.lora_B(m.lora_A(given[0])))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name)
    trained = [p for p in model.parameters() if p.requires_grad]
    by_hand(strategy, model, AdamW(trained, lr=1e-3), share=right_share)


def lora_that_no_optimizer_has() -> None:
    """Adapters go on a model that is sharded, with the optimizer of before."""
    from peft import LoraConfig, get_peft_model

    strategy = FSDP2()
    model, optimizer = built(strategy)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    by_hand(strategy, adapted, optimizer, share=right_share)


def optimizer_before_sharding() -> None:
    """The optimizer holds the tensors of before."""
    distft.init(seed=0)
    whole = tiny_model("L")
    early = AdamW(whole.parameters(), lr=1e-3)
    model, _ = FSDP2().apply(whole, partial(AdamW, lr=1e-3))
    by_hand(FSDP2(), model, early, share=right_share)


def masks_drawn_anew() -> None:
    """Blocks are recomputed without their random state, and attention has dropout."""
    strategy = DDP()
    model, optimizer = built(strategy, attention_dropout=0.1)
    distft.unwrap(model).gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False, "preserve_rng_state": False}
    )
    steps(strategy, model, optimizer)


def mean_of_means() -> None:
    """Each rank averages over its own tokens, and the ranks' means are averaged."""
    by_hand(
        DDP(),
        *built(DDP()),
        share=lambda model, batch, count: model(**batch).loss / (2 * DDP().dp_size),
    )


def same_rows_everywhere() -> None:
    """Every data rank reads what rank 0 reads."""
    steps(DDP(), *built(DDP()), batches=lambda _, step: tiny_batches([5], seed=step))


def no_gradient_on_a_rank() -> None:
    """An expert of rank 1 got no token, so its gradient is not there: case 62."""

    def spoil(step: int, model: Any, _: Any) -> None:
        if group_rank() == 1:
            distft.unwrap(model).model.layers[1].mlp.experts.down_proj.grad = None

    by_hand(DDP(), *built(DDP(), "M"), share=right_share, before_update=spoil)


def weights_part() -> None:
    """Rank 1 changes a weight that others hold too."""

    def spoil(step: int, model: Any, _: Any) -> None:
        if group_rank() == 1:
            with torch.no_grad():
                distft.unwrap(model).model.norm.weight[3] += 0.01

    steps(DDP(), *built(DDP()), after=spoil)


def two_tied_tensors() -> None:
    """Embedding and head are two tensors where the config ties them: case 3."""
    distft.init(seed=0)
    whole = tiny_model("Lt")
    whole.lm_head.weight = nn.Parameter(whole.lm_head.weight.detach().clone())
    model, optimizer = FSDP2().apply(whole, partial(AdamW, lr=1e-3))
    steps(FSDP2(), model, optimizer)


def state_held_twice() -> None:
    """The optimizer keeps a whole copy of each parameter beside its part."""

    def spoil(step: int, model: Any, optimizer: Any) -> None:
        for parameter, state in optimizer.state.items():
            state["copy"] = parameter.full_tensor()

    steps(FSDP2(), *built(FSDP2()), after=spoil)


def tokens_counted_twice() -> None:
    """The count of loss tokens has the copies of the tp group."""
    strategy = TP(tp=2)
    by_hand(
        strategy,
        *built(strategy),
        share=lambda model, batch, count: right_share(model, batch, 2 * count),
    )


def tp_masks_differ() -> None:
    """The ranks of a tp group draw other random numbers."""
    from peft import LoraConfig

    strategy = TP(tp=2)
    lora = LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.2, init_lora_weights=False)
    model, optimizer = built(strategy, lora=lora)
    torch.manual_seed(group_rank())
    steps(strategy, model, optimizer)


def scheduler_on_one_rank() -> None:
    """Rank 0 alone steps the scheduler."""
    model, optimizer = built(DDP())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def spoil(*_: Any) -> None:
        if group_rank() == 0:
            schedule.step()

    steps(DDP(), model, optimizer, after=spoil)


def reduced_in_bf16() -> None:
    """fully_shard sums gradients in bf16."""
    strategy = FSDP2(precision="bf16-mixed")
    model, optimizer = built(strategy)
    for module in model.modules():
        if hasattr(module, "_get_fsdp_state"):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    parameter.reduce_dtype = torch.bfloat16
    steps(strategy, model, optimizer)


def engine_reduces_in_bf16() -> None:
    """DeepSpeed's settings were changed to sum gradients in bf16."""
    strategy = ZeRO1(precision="bf16-mixed")
    model, optimizer = built(strategy)
    model.communication_data_type = torch.bfloat16
    steps(strategy, model, optimizer)


# What is planted, and words of the message that name it.
FAULTS: dict[Callable[[], None], tuple[str, ...]] = {
    stale_buffer: ("buffer of model.rotary_emb.inv_freq", "stale"),
    gradients_not_summed: ("gradient of", "No collective has summed"),
    replicated_gradient_differs: ("gradient of model.norm.weight", "rank 1"),
    moments_in_bf16: ("moments", "bfloat16"),
    weights_in_bf16: ("storage", "bfloat16"),
    tp_rows_differ: ("Ranks 0 and 1 are in one tp group of 2", "different ones"),
    one_rank_skips_a_batch: ("rank 1 made 1, rank 0 made 2",),
    lora_after_sharding: ("lora_A", "No collective has summed"),
    lora_that_no_optimizer_has: ("adapter tensors, attached after sharding",),
    optimizer_before_sharding: ("built before the model was sharded",),
    masks_drawn_anew: ("model.layers.", "dropout masks differ"),
    mean_of_means: ("the mean of 4 batches' means",),
    same_rows_everywhere: ("All 2 data ranks read the same rows",),
    no_gradient_on_a_rank: ("rank 1 of 2 ranks that hold model.layers.1.mlp.experts.down_proj",),
    weights_part: ("weight of model.norm.weight", "rank 1"),
    two_tied_tensors: ("2 tensors for them instead of 1",),
    state_held_twice: ("bytes of model state", "held twice"),
    tokens_counted_twice: ("each counted once",),
    tp_masks_differ: ("different random states",),
    scheduler_on_one_rank: ("learning rates", "on every rank"),
    engine_reduces_in_bf16: ("here ranks reduce in bfloat16",),
    reduced_in_bf16: ("here ranks reduce in bfloat16",),
}


def plant_all(only: str | None = None) -> dict[str, str | None]:
    """Return for each fault what was raised, on this rank."""
    found: dict[str, str | None] = {}
    for fault in FAULTS:
        if only is not None and fault.__name__ != only:
            continue
        try:
            fault()
        except (RuntimeError, ValueError) as error:
            found[fault.__name__] = str(error)
        else:
            found[fault.__name__] = None
    return found


def train_clean(cells: Any) -> list[str]:
    """Return what the invariants say of runs without a fault."""
    from peft import LoraConfig

    said = []
    for strategy, model, changes, adapted in cells:
        lora = LoraConfig(r=2, target_modules=["q_proj", "o_proj"], lora_dropout=0.1)
        running = built(strategy, model, lora=lora if adapted else None, **changes)
        held = steps(strategy, *running, batches=lambda s, step: rows_of(s, step, 2))
        said.append(str(held))
    return said
