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


def test_the_one_secondary_group_can_be_made_and_replaced():
    from deepspeed.utils import groups

    assert hasattr(groups, "_ZERO_PARAM_INTRA_PARALLEL_GROUP")
    assert callable(groups._create_zero_param_parallel_group)
    assert callable(groups._get_zero_param_intra_parallel_group)
    assert "zero_param_parallel_group" in inspect.signature(deepspeed.zero.Init).parameters


def test_secondary_copies_are_where_they_are_dropped():
    from deepspeed.runtime.zero import partition_parameters
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3 as stage_3

    assert callable(partition_parameters.Init._partition_param_sec)
    assert "ds_secondary_tensor = None" in inspect.getsource(stage_3.invalidate_secondary_tensor)


def test_an_op_that_an_accelerator_lacks_has_a_builder_that_only_raises():
    from deepspeed.ops.op_builder.cpu import NotImplementedBuilder

    from distft.strategies.ops import has_op

    accelerator = deepspeed.accelerator.get_accelerator()
    made = accelerator.create_op_builder("QuantizerBuilder")
    assert isinstance(made, NotImplementedBuilder) == (accelerator.device_name() == "cpu")
    if accelerator.device_name() == "cpu":
        assert not has_op(accelerator, "QuantizerBuilder")


def test_weights_are_quantized_in_groups_of_the_size_that_the_formula_has():
    from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer

    from distft.formulas.zero_plus import GROUP_NUMEL

    assert CUDAQuantizer.target_group_size == GROUP_NUMEL


def test_the_kernel_that_quantizes_gradients_still_reads_fp16_alone():
    """Where this fails upstream has mended it, and `check_quantizer` need not refuse it."""
    from pathlib import Path

    source = Path(deepspeed.__file__).parent / "ops/csrc/quantization/pt_binding.cpp"
    body = source.read_text().split("ds_swizzle_quant(", 1)[1].split("\nstd::vector", 1)[0]
    assert "(__half*)input_vals.data_ptr()" in body
    assert "scalar_type" not in body


def test_the_engine_has_what_a_save_is_captured_by():
    writer = deepspeed.runtime.checkpoint_engine.TorchCheckpointEngine
    assert list(inspect.signature(writer.save).parameters) == ["self", "state_dict", "path"]
    assert callable(deepspeed.DeepSpeedEngine._copy_recovery_script)
    assert "self.checkpoint_engine.save(" in inspect.getsource(
        deepspeed.DeepSpeedEngine._save_zero_checkpoint
    )


def test_state_on_a_disk_has_the_names_by_which_it_is_found():
    from deepspeed.runtime.swap_tensor import optimizer_utils, utils
    from deepspeed.runtime.zero import stage3

    from distft.formulas.disk import ALIGNMENT, ELEMENT_BYTES, LEAST_BYTES

    assert utils.MIN_AIO_BYTES == LEAST_BYTES
    assert utils.AIO_ALIGNED_BYTES == ALIGNMENT * ELEMENT_BYTES
    source = inspect.getsource(stage3)
    for name in (
        "_swap_out_offload_fp32_gradients",
        "optimizer_swapper",
        "swap_optimizer",
        "fp16_partitioned_groups_flat_numel",
        "grad_partitions_flat_buffer",
    ):
        assert f"self.{name}" in source
    source = inspect.getsource(optimizer_utils)
    for name in ("swap_params_info", "swap_folder", "swap_element_size"):
        assert f"self.{name}" in source
    # Where a moment's file lies.
    assert "f'{OptimizerSwapper.parameter_id(tensor)}.tensor.swp'" in source
    assert "value.ds_id = state_name + '-' + parameter.ds_id" in source
    for name in ("release_unswapped_gradients", "add_state_tensors", "release_memory"):
        assert callable(getattr(optimizer_utils.OptimizerStateSwapInfo, name))
    assert callable(optimizer_utils.OptimizerSwapper.purge_state)
    assert callable(deepspeed.DeepSpeedEngine.zero_nvme_offload_optimizer)


def test_parameters_on_a_disk_still_lose_their_dtype():
    """Where this fails upstream has mended it, and "nvme:PATH" may take the parameters too."""
    from deepspeed.runtime.swap_tensor import partitioned_param_swapper
    from deepspeed.runtime.zero import partition_parameters

    # bf16 wherever the device has no fp16, whatever dtype was asked for.
    assert "self.dtype = dtype or torch.float16 if " in inspect.getsource(partition_parameters)
    # And what stands for a part that is on the disk is fp16.
    source = inspect.getsource(partitioned_param_swapper)
    assert "self.invalid_buffer = torch.tensor(1).half()" in source
