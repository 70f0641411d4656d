"""Where DeepSpeed's engine is bent: the only file that knows its private names.

`tests/deepspeed/test_private_names.py` fails first when one of them moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch

from distft.strategies import on_disk


class EngineOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose step is the engine's, so that schedulers work on it.

    Parameter groups and state are those of the torch optimizer inside.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        keep_groups(engine.optimizer, engine.basic_optimizer)
        # What Optimizer.__init__ makes beside groups and state: the tables of hooks, and the
        # wrapped step that calls them.
        self.__setstate__({"defaults": self.inner.defaults})

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The torch optimizer over this rank's flat partitions."""
        inner: torch.optim.Optimizer = self.engine.optimizer.optimizer
        return inner

    # Properties where torch has attributes: the engine may replace what they return.
    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the weights and bring them to every rank.

        Raises:
            ValueError: There is a closure.

        Collective: every rank.
        """
        if closure is not None:
            raise ValueError(
                "A ZeRO optimizer takes no closure, since the engine runs the backward pass once. "
                "Call step() without one."
            )
        self.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop what backward passes accumulated since the last update, a part of a window too.

        Collective: none.
        """
        zero = self.engine.optimizer
        zero.zero_grad(set_to_none=True)
        for gradients in (zero.averaged_gradients, getattr(zero, "all_grad_tensors", {})):
            for index in gradients:
                gradients[index] = None
        # What its own step does, so that the next backward pass replaces instead of adding.
        zero.micro_step_id = -1
        if self.engine.zero_optimization_stage() == 3:
            zero.micro_step_id = 0
            # It replaces only what the first micro-step of a window has a gradient for.
            zero.grad_partitions_flat_buffer.zero_()
        # A parameter without a gradient in the next window would keep this one's on the host.
        for partition in host_partitions(self.engine):
            if partition.grad is not None:
                partition.grad.zero_()
        zero._epilogue_ran_this_backward = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's partitions, as the torch optimizer inside has it.

        Raises:
            RuntimeError: The state is on a disk.
        """
        self._check_in_memory("state_dict")
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the state of this rank's partitions.

        Raises:
            RuntimeError: The state is on a disk.
        """
        self._check_in_memory("load_state_dict")
        self.inner.load_state_dict(state_dict)

    def _check_in_memory(self, call: str) -> None:
        if self.engine.zero_nvme_offload_optimizer():
            raise RuntimeError(
                f"{call}() of an optimizer whose state is on a disk: its tensors hold 0 elements "
                "between steps. Use save() and load() of the strategy."
            )


def master_partitions(engine: Any) -> list[torch.Tensor]:
    """Return this rank's flat partitions of master weights, which the torch optimizer updates.

    Collective: none.
    """
    zero = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        return list(zero.fp32_partitioned_groups_flat)
    return list(zero.single_partition_of_fp32_groups)


def host_partitions(engine: Any) -> list[torch.Tensor]:
    """Return the master partitions where they are offloaded, their gradients on them; else none.

    Collective: none.
    """
    return master_partitions(engine) if engine.zero_use_cpu_optimizer() else []


@contextmanager
def one_zero_optimizer(engine_class: Any) -> Iterator[None]:
    """Make stage 1 in mixed precision use the ZeRO optimizer that every other case uses.

    For bf16 weights with fp32 accumulation the engine picks its older BF16_Optimizer, which
    all-reduces whole gradients to every rank and keeps them in other places.

    Collective: none.
    """
    original = engine_class._do_optimizer_sanity_check

    def check(engine: Any, basic_optimizer: Any) -> Any:
        stage = engine.zero_optimization_stage()
        return "zero_optimization" if stage == 1 else original(engine, basic_optimizer)

    engine_class._do_optimizer_sanity_check = check
    try:
        yield
    finally:
        engine_class._do_optimizer_sanity_check = original


class _Runs:
    """Flat buffers, one for each run of tensors of one dtype, addressed as if they were one."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self.buffers = buffers

    def narrow(self, dim: int, start: int, length: int) -> torch.Tensor:
        """Return a part that lies in one of the buffers."""
        for buffer in self.buffers:
            if start < buffer.numel():
                return buffer.narrow(dim, start, length)
            start -= buffer.numel()
        raise ValueError(f"Nothing lies {start} elements behind {len(self.buffers)} buffers.")


@contextmanager
def kept_in_fp32(
    engine_class: Any, stage3: Any, parameters: Sequence[torch.nn.Parameter]
) -> Iterator[None]:
    """Make an engine that casts a model to bf16 leave some parameters in fp32.

    Stage 3 moves its parts into one buffer, of which it then takes a piece for each group: here
    one buffer for each run of groups of one dtype.

    Args:
        engine_class: DeepSpeed's engine.
        stage3: The module of its stage 3 optimizer.
        parameters: What stays fp32, in parameter groups of its own.

    Collective: none.
    """
    if not parameters:
        yield
        return
    original, defragment = engine_class._cast_module_mixed_precision, stage3.defragment

    def cast(engine: Any, *args: Any, **kwargs: Any) -> None:
        values = [parameter.data for parameter in parameters]
        original(engine, *args, **kwargs)
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data = value.to(parameter.device)

    def by_dtype(tensors: Sequence[torch.Tensor]) -> _Runs:
        runs = groupby(tensors, key=lambda tensor: tensor.dtype)
        return _Runs([defragment(list(run)) for _, run in runs])

    engine_class._cast_module_mixed_precision = cast
    stage3.defragment = by_dtype
    try:
        yield
    finally:
        engine_class._cast_module_mixed_precision = original
        stage3.defragment = defragment


def stage_in_fp32(zero: Any) -> None:
    """Make a stage 2 optimizer collect gradients in fp32 before it reduces them.

    Its buffer has the dtype of the first weights, which would round the gradients of those that
    are fp32 to bf16.

    Collective: none.
    """
    zero._gradient_reduction_buffer_dtype = lambda: torch.float32


def keep_groups(zero: Any, client: torch.optim.Optimizer) -> None:
    """Give an Adagrad its parameter groups back, which the engine merges into one.

    Adagrad makes its state when it is built, so the engine builds another over its flat
    partitions, from the defaults alone: rates and weight decay of single groups would be lost.

    Collective: none.
    """
    if zero.optimizer is client:
        return
    made = zero.optimizer
    client.state.clear()
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        partitions = zero.fp32_partitioned_groups_flat
        groups = [zero.sub_group_to_group_id[index] for index in range(len(partitions))]
    else:
        partitions = zero.single_partition_of_fp32_groups
        groups = list(range(len(partitions)))
    for partition, index in zip(partitions, groups, strict=True):
        client.state[partition] = state = made.state[partition]
        state["sum"].fill_(client.param_groups[index]["initial_accumulator_value"])
    zero.optimizer = client
    if hasattr(zero, "single_partition_of_fp32_groups"):
        # These were made for as many groups as the merged optimizer has.
        zero._link_all_hp_params()
        zero._param_slice_mappings = zero._create_param_mapping()


def gradients_by_group(engine: Any, home: Sequence[int]) -> dict[int | None, list[torch.Tensor]]:
    """Return this rank's reduced gradients by the number of a group; all under None for no home.

    Stages 1 and 2 keep them by group, stage 3 by sub-group. A group of which this rank has no
    part is there, and empty. Offloaded, each is the gradient of the master partition, on the host.

    Args:
        engine: The engine.
        home: For each group of the engine the number under which its gradients come.

    Collective: none.
    """
    found: dict[int | None, list[torch.Tensor]] = {number: [] for number in home} or {None: []}
    zero, host = engine.optimizer, host_partitions(engine)
    group_of = getattr(zero, "sub_group_to_group_id", {})
    held: dict[int, Any] = zero.averaged_gradients
    if host:
        held = {i: [p.grad] for i, p in enumerate(host) if p.grad is not None}
        held |= {i: [gradient] for i, gradient in on_disk.gradients(engine).items()}
    for index, tensors in held.items():
        found[home[group_of.get(index, index)] if home else None] += tensors or []
    return found


def sum_gradients(zero: Any) -> None:
    """Make a stage 3 optimizer sum gradients over ranks where it would average them.

    It divides by what this method says, after the reduction. Multiplying the loss instead would
    round every value of the backward pass anew.

    Raises:
        RuntimeError: This DeepSpeed has no such method.

    Collective: none.
    """
    if not hasattr(zero, "_gradient_averaging_world_size"):
        raise RuntimeError(
            "This DeepSpeed has no _gradient_averaging_world_size, which ZeRO3 sets to 1. "
            "Install deepspeed 0.19.8, which has it."
        )
    zero._gradient_averaging_world_size = lambda params, partition_world_size: 1


def free_accumulators(zero: Any) -> None:
    """Make a stage 1 optimizer free its whole fp32 gradients once they are reduced.

    It accumulates beside each parameter, copies its part out at the boundary, and would keep
    the rest until the update: up to 4 bytes a parameter.

    Collective: none.
    """
    reduce_all = zero.independent_gradient_partition_epilogue

    def reduce_and_free() -> None:
        reduce_all()
        if zero.is_gradient_accumulation_boundary():
            for group in zero.bit16_groups:
                for parameter in group:
                    parameter.grad_accum = None

    zero.independent_gradient_partition_epilogue = reduce_and_free


# By the number of ranks, of the world that the first entry is.
_secondary_groups: tuple[Any, dict[int, Any]] = (None, {})


def use_secondary_group(groups: Any, size: int | None) -> None:
    """Make the next engine keep its secondary copies in groups of `size` ranks; None for none.

    DeepSpeed keeps the one group that it made first, and takes it for every later model, whatever
    size that asks for.

    Args:
        groups: DeepSpeed's module of groups.
        size: Ranks of a group, which divides all ranks.

    Collective: every rank.
    """
    global _secondary_groups
    world, made = _secondary_groups
    if world is not torch.distributed.group.WORLD:
        _secondary_groups = torch.distributed.group.WORLD, (made := {})
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    if size is None:
        return
    if size not in made:
        groups._create_zero_param_parallel_group(size)
        made[size] = groups._ZERO_PARAM_INTRA_PARALLEL_GROUP
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = made[size]


def forget_copies(engine: Any) -> None:
    """Drop secondary copies of weights, so that the next gathering reads the weights themselves.

    DeepSpeed drops those of trained weights after an update. A load changes frozen ones too.

    Collective: none.
    """
    for parameter in engine.module.parameters():
        parameter.ds_secondary_tensor = None
