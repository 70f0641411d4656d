"""The arithmetic of what fits, on models whose bytes are known by hand."""

from __future__ import annotations

import pickle

import pytest
import torch

from distft import DDP, FSDP2, HSDP, ModelSpec, OutOfMemory, Workload, ZeRO2, ZeRO3
from distft.measure.out_of_memory import asked_bytes, find_out_of_memory, room_on_host
from distft.spec import TensorSpec
from distft.strategies.changes import Change, list_changes, shortfall, smallest_that_fits
from distft.strategies.out_of_memory import explained

# 1,024,000 parameters, 4,096,000 bytes in fp32: each of 4 ranks holds 1,024,000 bytes of weights.
SPEC = ModelSpec((TensorSpec("a", (1000, 1024)),))


def changes_of(strategy, phase, **options):
    return list_changes(strategy, SPEC, Workload(), 4, phase, **options)


def named(changes):
    return {change.what: change for change in changes}


def test_loading_is_saved_by_what_splits_parameters_and_by_nothing_else():
    # Weights whole take 4,096,000 bytes, split over 4 ranks a quarter, in bf16 half. ZeRO-1 and
    # ZeRO-2 hold them whole, so they are no help here.
    found = named(changes_of(DDP(), "load"))
    assert {what: change.saved_bytes for what, change in found.items()} == {
        'precision="bf16" (also rounds weights)': 2_048_000,
        "ZeRO3": 3_072_000,
        "FSDP2": 3_072_000,
    }


def test_a_secondary_copy_is_what_can_be_left_out():
    found = named(changes_of(ZeRO3(secondary_partition=2), "forward"))
    assert found["secondary_partition=None"].saved_bytes == 2_048_000
    assert 'offload="params"' not in found


def test_of_changes_that_cover_the_shortfall_the_first_is_named():
    found = changes_of(DDP(), "load")
    assert smallest_that_fits(found, 2_048_000).what.startswith('precision="bf16"')
    assert smallest_that_fits(found, 2_048_001).what == "ZeRO3"
    assert smallest_that_fits(found, 3_072_001) is None


def test_activations_come_first_and_are_never_said_to_fit():
    found = changes_of(DDP(), "forward", shape=(5, 16))
    assert [change.what for change in found[:3]] == [
        "micro_batch=2 in place of 5, and grad_accum times 3",
        "activation_checkpointing=True",
        'precision="bf16-mixed"',
    ]
    assert all(change.saved_bytes is None for change in found[:3])
    assert smallest_that_fits([Change("less")], 0) is None


@pytest.mark.parametrize(
    ("shape", "trains", "what"),
    [
        ((6, 16), False, "3 rows at a time in place of 6"),
        ((1, 16), True, "shorter rows than 16 tokens: there is 1 row at a time already"),
        (None, True, "fewer rows at a time, and a larger grad_accum"),
    ],
)
def test_a_smaller_batch_is_said_in_numbers_that_are_known(shape, trains, what):
    assert changes_of(DDP(), "forward", shape=shape, trains=trains)[0].what == what


def test_what_a_strategy_keeps_for_speed_comes_before_its_precision_and_other_strategies():
    strategy = HSDP(
        dp_replicate=2,
        reshard_after_forward=False,
        defer_reduce=True,
        activation_checkpointing=True,
        precision="bf16-mixed",
    )
    # The root is not split again, so give the model a block that is.
    blocks = tuple(TensorSpec(f"b{i}.w", (1000, 1024), f"b{i}") for i in range(3))
    found = list_changes(strategy, ModelSpec(blocks), Workload(), 4, "backward")
    predicted = [change.what for change in found if change.saved_bytes is not None]
    assert predicted.index("defer_reduce=False") < predicted.index("FSDP2")
    assert "activation_checkpointing=True" not in named(found)


def test_more_ranks_help_a_strategy_that_splits_and_do_not_help_ddp():
    # Adam's two moments and the weights, a quarter and an eighth: 3 * 4,096,000 * (1/4 - 1/8).
    found = named(list_changes(ZeRO3(), SPEC, Workload(), 4, "load"))
    assert found["8 ranks in place of 4"].saved_bytes == 512_000
    assert not [what for what in named(changes_of(DDP(), "step")) if "ranks in place" in what]


def test_degrees_that_more_ranks_do_not_fit_are_left_out():
    found = named(list_changes(FSDP2(dp_shard=4), SPEC, Workload(), 4, "step"))
    assert not [what for what in found if "ranks in place" in what]


def test_other_strategies_are_those_that_split_more():
    found = [change.what for change in changes_of(ZeRO2(), "step")]
    assert "DDP" not in found
    assert "ZeRO1" not in found
    assert "ZeRO3" in found


def test_the_shortfall_counts_moments_beside_activations_and_not_twice_in_the_update():
    missing = {"parameters": 50, "gradients": 20, "optimizer": 100}
    assert shortfall("forward", 40, missing, 30) == 110  # 40 + 100 - 30
    assert shortfall("backward", 40, missing, 200) == 0
    assert shortfall("step", 40, missing, 30) == 70  # max(40, 100) - 30
    assert shortfall("load", 40, missing, 30) == 20  # max(40, 50) - 30


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 MiB. GPU"), 2_621_440),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB (on rank 1)"), 2**31),
        (RuntimeError("CUDA error: out of memory"), None),
        (MemoryError(), None),
    ],
)
def test_errors_of_memory_are_known_also_where_another_error_was_raised_from_them(error, asked):
    outer = ValueError("reading failed")
    outer.__cause__ = error
    assert find_out_of_memory(outer) is error
    assert asked_bytes(str(error)) == asked


def test_the_allocator_of_the_host_really_says_what_is_looked_for():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert find_out_of_memory(caught.value) is caught.value
    assert asked_bytes(str(caught.value)) == 4 * 10**15


def test_an_error_in_building_the_text_leaves_the_error_of_memory():
    # There is no process group, so nothing can be predicted.
    model = torch.nn.Linear(2, 2)
    with pytest.raises(OutOfMemory) as caught, explained(DDP(), "train_step", model):
        torch.empty(10**15)
    assert "More cannot be said here" in str(caught.value)
    assert isinstance(caught.value, torch.OutOfMemoryError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.phase, again.asked_bytes, str(again)) == (
        "train_step",
        4 * 10**15,
        str(caught.value),
    )


def test_other_errors_pass_as_they_are():
    with pytest.raises(ValueError, match="mine"), explained(DDP(), "apply"):
        raise ValueError("mine")


def test_the_host_has_less_free_than_it_has():
    room = room_on_host()
    assert 0 < room.free < room.total
    assert 0 < room.allocated < room.total
