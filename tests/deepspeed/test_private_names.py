"""Upstream's private names that distft touches: this fails first when one of them moves."""

from __future__ import annotations

import inspect

import pytest
import torch

deepspeed = pytest.importorskip("deepspeed", reason="needs distft[deepspeed]")


def test_the_engine_has_the_check_that_picks_an_optimizer():
    assert callable(deepspeed.DeepSpeedEngine._do_optimizer_sanity_check)


def test_stage_3_has_the_number_it_averages_by():
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as stage_3

    parameters = list(inspect.signature(stage_3._gradient_averaging_world_size).parameters)
    assert parameters == ["self", "params", "partition_world_size"]


def test_stage_1_has_the_epilogue_after_which_accumulators_are_free():
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer as stage_1

    for name in ("independent_gradient_partition_epilogue", "is_gradient_accumulation_boundary"):
        assert callable(getattr(stage_1, name))


def test_the_ops_can_be_switched_off_one_by_one():
    assert "deepspeed_shm_comm" in deepspeed.ops.__compatible_ops__


def test_the_groups_of_a_world_that_is_gone_can_be_forgotten():
    from deepspeed.utils import groups

    assert hasattr(deepspeed.comm.comm, "cdb")
    assert callable(groups._release_process_group_references)


def test_torch_has_the_store_of_the_default_group():
    assert callable(torch.distributed.distributed_c10d._get_default_store)


def test_both_optimizers_have_the_partitions_whose_groups_an_adagrad_gets_back():
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    for module, names in (
        (stage3, ("fp32_partitioned_groups_flat", "sub_group_to_group_id")),
        (
            stage_1_and_2,
            (
                "single_partition_of_fp32_groups",
                "_link_all_hp_params",
                "_param_slice_mappings",
                "_create_param_mapping",
            ),
        ),
    ):
        source = inspect.getsource(module)
        assert all(f"self.{name}" in source for name in names)


def test_both_optimizers_say_where_a_parameter_lies_in_their_partitions():
    from deepspeed.runtime.zero import stage3, stage_1_and_2
    from deepspeed.utils.tensor_fragment import tensor_fragment

    for module, names in (
        (stage3, ("grad_position", "get_param_id", "_get_param_partition_rank")),
        (stage_1_and_2, ("bit16_groups", "_hp_optimizer_states_linked", "compute_grad_norm")),
    ):
        source = inspect.getsource(module)
        assert all(f"self.{name}" in source for name in (*names, "clip_grad"))
    fields = inspect.signature(tensor_fragment).parameters
    assert {"hp_fragment_address", "lp_fragment_address"} <= set(fields)


def test_the_engine_has_the_cast_and_the_buffers_that_weights_kept_in_fp32_go_round():
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    assert callable(deepspeed.DeepSpeedEngine._cast_module_mixed_precision)
    assert "self.lp_param_buffer = defragment(" in inspect.getsource(stage3)
    assert "self.lp_param_buffer.narrow(0, offset, " in inspect.getsource(stage3)
    source = inspect.getsource(stage_1_and_2.DeepSpeedZeroOptimizer.setup_buckets)
    assert "dtype=self._gradient_reduction_buffer_dtype()" in source


def test_what_checkpoints_may_name_is_still_deepspeeds():
    import importlib

    from distft.checkpoint.readers.unpickle import ALLOWED

    for name in ALLOWED:
        module, _, attribute = name.rpartition(".")
        if module.startswith("deepspeed"):
            assert hasattr(importlib.import_module(module), attribute), name
