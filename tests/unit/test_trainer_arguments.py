"""Every argument of TRL's trainer is honoured under every strategy, or refused by name."""

from __future__ import annotations

import dataclasses
import inspect
import os

import pytest

import distft
from distft.trainer.arguments import (
    REFUSED,
    check_arguments,
    check_kind,
    check_objects,
    strategy_of,
)

trl = pytest.importorskip("trl")
# TRL sets a field of transformers by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing.*:FutureWarning")

# What the strategy takes over, in its own way.
TAKEN_OVER = {
    "bf16", "activation_checkpointing", "activation_checkpointing_kwargs", "max_grad_norm",
    "average_tokens_across_devices", "gradient_accumulation_steps", "optim", "optim_args",
    "optim_target_modules", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon",
    "learning_rate", "seed", "data_seed", "train_sampling_strategy", "accelerator_config",
    "gradient_checkpointing", "gradient_checkpointing_kwargs", "dataloader_drop_last",
    "per_device_train_batch_size", "per_device_eval_batch_size", "save_total_limit",
    "load_best_model_at_end", "ignore_data_skip", "save_strategy", "save_steps",
    "router_aux_loss_coef", "output_dir",
}  # fmt: skip
# What TRL and transformers do with model, data, log and schedule, which no strategy touches.
THEIRS = {
    "num_train_epochs", "max_steps", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps",
    "label_smoothing_factor", "tf32", "torch_compile_backend", "torch_compile_mode",
    "use_liger_kernel", "liger_kernel_config", "use_cache", "neftune_noise_alpha",
    "torch_empty_cache_steps", "logging_strategy", "logging_steps", "logging_first_step",
    "log_on_each_node", "logging_nan_inf_filter", "include_num_input_tokens_seen", "log_level",
    "log_level_replica", "disable_tqdm", "report_to", "run_name", "project", "trackio_space_id",
    "trackio_bucket_id", "trackio_static_space_id", "eval_strategy", "eval_steps", "eval_delay",
    "prediction_loss_only", "eval_on_start", "eval_do_concat_batches", "eval_use_gather_object",
    "eval_accumulation_steps", "include_for_metrics", "batch_eval_metrics",
    "enable_jit_checkpoint", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy",
    "hub_always_push", "hub_revision", "metric_for_best_model", "greater_is_better",
    "restore_callback_states_from_checkpoint", "full_determinism", "use_cpu",
    "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers",
    "dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order",
    "remove_unused_columns", "label_names", "length_column_name", "ddp_timeout", "debug",
    "skip_memory_metrics", "do_train", "do_eval", "do_predict", "resume_from_checkpoint",
    "local_rank", "model_init_kwargs", "trust_remote_code", "chat_template_path",
    "dataset_text_field", "dataset_kwargs", "dataset_num_proc", "eos_token", "max_length",
    "truncation_mode", "shuffle_dataset", "packing", "packing_strategy", "padding_free",
    "pad_to_multiple_of", "eval_packing", "completion_only_loss", "assistant_only_loss",
    "loss_type", "pad_token",
    # Nothing without `fsdp`.
    "fsdp_config",
}  # fmt: skip
ARGUMENTS = {
    "model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class",
    "compute_loss_func", "compute_metrics", "callbacks", "optimizers", "optimizer_cls_and_kwargs",
    "preprocess_logits_for_metrics", "quantization_config", "peft_config", "formatting_func",
}  # fmt: skip


@pytest.fixture
def args(tmp_path):
    before = dict(os.environ)
    yield trl.SFTConfig(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    # Accelerate keeps its settings there.
    os.environ.clear()
    os.environ.update(before)


def test_every_field_of_a_configuration_is_known(args):
    known = TAKEN_OVER | THEIRS | set(REFUSED)
    assert {field.name for field in dataclasses.fields(args)} <= known
    assert not set(REFUSED) & (TAKEN_OVER | THEIRS)


def test_every_argument_of_trls_trainer_is_known():
    found = set(inspect.signature(trl.SFTTrainer.__init__).parameters) - {"self"}
    assert found == ARGUMENTS


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_contradicts_a_strategy_is_refused_by_name(args, name):
    check_arguments(args)
    setattr(args, name, True)
    with pytest.raises(ValueError, match=rf"{name}=True.*beside a strategy: \w+"):
        check_arguments(args)


def test_a_mean_of_means_and_other_dealers_of_rows_are_refused(args):
    args.average_tokens_across_devices = False
    with pytest.raises(ValueError, match="mean of the ranks' means"):
        check_arguments(args)
    args.average_tokens_across_devices = True
    args.accelerator_config.split_batches = True
    with pytest.raises(ValueError, match="split_batches=True"):
        check_arguments(args)
    args.accelerator_config.split_batches = False
    args.accelerator_config.use_seedable_sampler = False
    with pytest.raises(ValueError, match="use_seedable_sampler=False"):
        check_arguments(args)
    args.accelerator_config.use_seedable_sampler = True
    args.train_sampling_strategy = "batch_rebalance"
    with pytest.raises(ValueError, match="batch_rebalance"):
        check_arguments(args)


def test_a_name_takes_the_precision_of_the_arguments_and_an_instance_has_its_own(args):
    args.activation_checkpointing = False
    assert strategy_of("fsdp2", args) == distft.FSDP2(precision="bf16-mixed")
    assert strategy_of(distft.FSDP2(), args) == distft.FSDP2()
    args.bf16, args.activation_checkpointing = False, True
    assert strategy_of("zero3", args) == distft.ZeRO3(activation_checkpointing=True)
    with pytest.raises(ValueError, match="is a int"):
        strategy_of(3, args)  # type: ignore[arg-type]


def test_an_optimizer_that_was_built_before_sharding_is_refused():
    import torch

    built = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match=r"got SGD, built before.*optimizer_cls_and_kwargs"):
        check_objects((built, None), None, None)


def test_adapters_on_a_model_that_is_spread_already_are_refused():
    import torch
    from peft import LoraConfig

    from distft.checkpoint import pretrained

    model = torch.nn.Linear(2, 2)
    setattr(model, pretrained._MARK, (distft.FSDP2(), "float32"))
    check_objects((None, None), model, None)
    with pytest.raises(ValueError, match=r"spread already.*Pass peft_config to load_model"):
        check_objects((None, None), model, LoraConfig())


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"ref_model": None, "beta": 0.1}, r"no argument ref_model, beta among SFTTrainer's"),
        ({"train_dataset": {"prompt": [], "chosen": [], "rejected": []}}, r"as DPO has them"),
    ],
)
def test_arguments_of_another_trainer_are_refused(args, others, said):
    from datasets import Dataset

    if "train_dataset" in others:
        others = {"train_dataset": Dataset.from_dict(others["train_dataset"])}
    check_kind(args, {"processing_class": None})
    with pytest.raises(ValueError, match=said):
        check_kind(args, others)


def test_a_configuration_of_another_trainer_is_refused(args, tmp_path):
    other = trl.DPOConfig(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match=r"got a DPOConfig.*Pass an SFTConfig"):
        distft.Trainer(None, other)


def test_what_the_trainer_replaces_is_there_upstream():
    from distft.trainer._hf import REPLACED, StrategyAccelerator

    assert [name for name in REPLACED if not hasattr(trl.SFTTrainer, name)] == []
    parts = distft.Trainer.__mro__[: distft.Trainer.__mro__.index(trl.SFTTrainer)]
    ours = {name for part in parts for name in vars(part)}
    assert ours >= set(REPLACED)
    for name in ("backward", "no_sync", "prepare_model", "prepare_data_loader", "gather"):
        assert hasattr(StrategyAccelerator.__mro__[1], name)
