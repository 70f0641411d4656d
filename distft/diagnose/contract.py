"""What must hold on each rank by itself: dtypes, the optimizer's tensors, ties, planned bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from distft.diagnose._fully_shard import reduce_dtypes
from distft.kept import is_adapter
from distft.peft import base_model
from distft.quantized import packed_layers
from distft.training.wrappers import is_engine, unwrap

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from distft.strategies.base import Strategy

# What each precision keeps weights, sums of gradients and moments in. An engine has its masters
# beside the weights of the model, which are then in the dtype of compute.
_ALLOWED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "fp32": {"storage": ("float32",), "compute": ("float32",), "moments": ("float32",)},
    "bf16-mixed": {
        "storage": ("float32", "bfloat16"),
        "compute": ("bfloat16", "float32"),
        "moments": ("float32",),
    },
    "bf16": {
        "storage": ("bfloat16", "float32"),
        "compute": ("bfloat16", "float32"),
        "moments": ("bfloat16", "float32"),
    },
}
# What PEFT's wrappers have that train a module of their own in place of the tied one.
_TRAINED_APART = ("modules_to_save", "token_adapter")
# A rank may hold this share more than was planned.
_SLACK = 0.02


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of a run, each with its number of tensors; those of moments after an update.

    Attributes:
        storage: Of trained parameters.
        compute: Of the first linear layer's output.
        gradients: Of gradients after their reduction, where parameters hold them.
        reduce: In which ranks sum gradients.
        moments: Of the optimizer's tensors.
    """

    storage: tuple[tuple[str, int], ...]
    compute: str = ""
    gradients: tuple[tuple[str, int], ...] = ()
    reduce: tuple[str, ...] = ()
    moments: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        """Show one line for each."""
        rows = {
            "storage": self.storage,
            "compute": self.compute,
            "reduce": self.reduce,
            "gradients": self.gradients,
            "moments": self.moments,
        }
        return "\n".join(f"{name:<10}{_say(found)}" for name, found in rows.items())


def _say(found: Any) -> str:
    if not found:
        return "(not seen)"
    if isinstance(found, str):
        return found
    return ", ".join(
        each if isinstance(each, str) else f"{each[0]} ({each[1]} tensors)" for each in found
    )


def read_dtypes(model: nn.Module, optimizer: Optimizer, compute: str = "") -> Dtypes:
    """Return the dtypes that this rank's tensors have now.

    Collective: none.
    """
    trained = [p for p in unwrap(model).parameters() if p.requires_grad]
    gradients = [p.grad for p in trained if p.grad is not None]
    return Dtypes(
        _count(trained),
        compute,
        _count(gradients),
        _reduce_dtypes(model),
        _count(tensor for _, tensor in moments(optimizer)),
    )


def _count(tensors: Any) -> tuple[tuple[str, int], ...]:
    found = Counter(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
    return tuple(sorted(found.items()))


def _reduce_dtypes(model: nn.Module) -> tuple[str, ...]:
    """Return the dtypes in which ranks sum gradients."""
    from torch.nn.parallel import DistributedDataParallel

    if is_engine(model):
        found = {cast("Any", model).communication_data_type}
    elif isinstance(model, DistributedDataParallel):
        # Its buckets are views of gradients, which have their parameters' dtypes.
        found = {p.dtype for p in model.parameters() if p.requires_grad}
    else:
        found = set(reduce_dtypes(unwrap(model)))
    return tuple(sorted(str(dtype).removeprefix("torch.") for dtype in found))


def moments(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield name and tensor of what an optimizer keeps for each parameter, counters left out.

    Collective: none.
    """
    import torch

    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.is_floating_point():
                yield name, value


def tensors_of(optimizer: Optimizer) -> frozenset[int]:
    """Return which tensors an optimizer updates, by their ids.

    Collective: none.
    """
    return frozenset(id(p) for group in optimizer.param_groups for p in group["params"])


def check_optimizer(model: nn.Module, held: frozenset[int]) -> None:
    """Raise where an optimizer holds other tensors than the model's, or lacks trained ones.

    Args:
        model: What `Strategy.apply` returned.
        held: What `tensors_of` says of the optimizer.

    Raises:
        RuntimeError: How many, and the order to follow.

    Collective: none.
    """
    if is_engine(model):
        # It keeps flat partitions of its own making.
        return
    trained = {id(p): name for name, p in unwrap(model).named_parameters() if p.requires_grad}
    everything = {id(p) for p in unwrap(model).parameters()}
    dead = held - everything
    if dead:
        raise RuntimeError(
            f"The optimizer holds {len(dead)} tensors, of {len(held)}, that are none of the "
            f"model's {len(everything)}: it was built before the model was sharded, and would "
            "train what is gone. Pass a factory to apply(model, partial(AdamW, lr=...))."
        )
    late = [name for key, name in trained.items() if key not in held]
    if late:
        adapters = [name for name in late if is_adapter(name)]
        what = "adapter tensors, attached after sharding" if adapters else "parameters"
        raise RuntimeError(
            f"The optimizer lacks {len(adapters or late)} trainable {what}, such as "
            f"{(adapters or late)[0]}, and holds {len(held)}: these never change. Attach adapters "
            "and set requires_grad before apply()."
        )


def check_ties(model: nn.Module) -> None:
    """Raise where a model whose config ties embedding and head holds two tensors.

    Raises:
        RuntimeError: The names, and what follows.

    Collective: none.
    """
    inner: Any = base_model(unwrap(model))
    config = getattr(inner, "config", None)
    text = getattr(config, "get_text_config", lambda: config)()
    if not getattr(text, "tie_word_embeddings", False) or not hasattr(
        inner, "get_input_embeddings"
    ):
        return
    embedding, head = inner.get_input_embeddings(), inner.get_output_embeddings()
    if any(hasattr(each, name) for each in (embedding, head) for name in _TRAINED_APART):
        return
    first, second = getattr(embedding, "weight", None), getattr(head, "weight", None)
    if first is None or second is None or first is second:
        return
    raise RuntimeError(
        "The config ties embedding and head, and the model has 2 tensors for them instead of 1: "
        f"each trains alone, and a checkpoint of {tuple(first.shape)} and {tuple(second.shape)} "
        "has one tensor too many. Call model.tie_weights() before apply()."
    )


def check_dtypes(strategy: Strategy, first: Dtypes, now: Dtypes) -> None:
    """Raise where dtypes are not those of the strategy's precision, or not those of before.

    Args:
        strategy: It has the precision.
        first: The dtypes at the beginning.
        now: The dtypes now.

    Raises:
        RuntimeError: Which kind of tensor has which dtype.

    Collective: none.
    """
    allowed = _ALLOWED[strategy.precision]
    compute = ((now.compute, 1),) if now.compute else ()
    for kind, found in (("storage", now.storage), ("compute", compute), ("moments", now.moments)):
        wrong = [(dtype, number) for dtype, number in found if dtype not in allowed[kind]]
        if wrong:
            raise RuntimeError(
                f"precision={strategy.precision!r} has {kind} in {' or '.join(allowed[kind])}, and "
                f"{wrong[0][1]} tensors of {kind} are {wrong[0][0]}: small updates are lost in "
                "rounding, or twice the memory is held. Look for a cast after apply(), and for an "
                "optimizer with a dtype of its own."
            )
    if strategy.precision != "bf16" and "bfloat16" in now.reduce:
        raise RuntimeError(
            f"precision={strategy.precision!r} sums gradients in float32, and here ranks reduce in "
            f"{', '.join(now.reduce)}. Leave the policy to Strategy.apply()."
        )
    for kind in ("storage", "gradients", "moments"):
        was, is_now = getattr(first, kind), getattr(now, kind)
        if was and is_now and {d for d, _ in was} != {d for d, _ in is_now}:
            raise RuntimeError(
                f"Tensors of {kind} were {_say(was)} and are {_say(is_now)} now. Cast before "
                "apply(), which knows what must stay."
            )


def check_planned_bytes(strategy: Strategy, model: nn.Module, optimizer: Optimizer) -> str:
    """Return the bytes of model state that this rank holds and those planned, in words.

    Called between a backward pass and an update that is not the first, when all state is there.

    Raises:
        RuntimeError: It holds more than was planned: a part is not sharded.

    Collective: none.
    """
    from distft.measure.memory import model_state_bytes
    from distft.process_group import group_rank
    from distft.spec import ModelSpec, Workload

    inner = unwrap(model)
    if packed_layers(inner) or any(not p.is_floating_point() for p in inner.parameters()):
        return "bytes as planned: not checked, the base is quantized"
    name = type(getattr(optimizer, "inner", optimizer)).__name__.lower()
    if any(group.get("momentum") or group.get("amsgrad") for group in optimizer.param_groups):
        return "bytes as planned: not checked, no plan knows momentum of SGD or amsgrad"
    try:
        mesh = strategy.mesh()
        spec, load = ModelSpec.from_model(inner), Workload(seq_len=16, optimizer=name)
        plan = strategy.state_memory(spec, load, world_size=mesh.num_ranks)
    except Exception as error:  # a model or optimizer without a plan trains all the same
        return f"bytes as planned: not checked ({error})"
    rank = group_rank()
    planned = plan.per_rank[rank] + plan.host_per_rank[rank]
    held = model_state_bytes(model, optimizer).total
    if held > planned * (1 + _SLACK):
        raise RuntimeError(
            f"Rank {rank} holds {held} bytes of model state, and {strategy!r} plans {planned}: "
            f"{_heaviest(inner)} is whole where it should be split, or state is held twice. "
            "Let apply() shard the whole model, and build no optimizer beside its own."
        )
    return f"bytes of model state: {held} held, {planned} planned"


def _heaviest(model: nn.Module) -> str:
    """Return the name of the largest parameter that is whole on this rank."""
    parameters: list[tuple[str, Any]] = list(model.named_parameters())
    whole = [
        (p.numel(), name)
        for name, p in parameters
        if not hasattr(p, "placements") or p.to_local().numel() == p.numel()
    ]
    return max(whole)[1] if whole else "a tensor"
