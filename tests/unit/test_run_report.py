"""What a run is said to cost, and the page of its curves."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

import distft
from distft.testing import tiny_config, tiny_model

pytest.importorskip("trl")
from distft.trainer.costs import flops_per_token, predicted, workload_of
from distft.trainer.report import write_report


def arguments(**changes):
    common = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "optim": "adamw_torch_fused",
    }
    return SimpleNamespace(**{**common, **changes})


def test_arithmetic_of_a_token_is_six_a_parameter_in_full_and_four_with_few_adapters():
    model = tiny_model("L")
    assert flops_per_token(model) == 6 * 23_904
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert flops_per_token(model) == 4 * 23_904


def test_of_experts_those_count_that_a_token_uses():
    assert flops_per_token(tiny_model("M")) == pytest.approx(6 * 21_248)


def test_a_workload_is_read_from_model_arguments_and_adapters():
    model = tiny_model("M")
    config = distft.moe_lora(model, r=12)
    load = workload_of(model.config, arguments(), config, 40)
    assert (load.micro_batch, load.seq_len, load.grad_accum) == (2, 40, 3)
    assert (load.lora_rank, load.expert_lora_rank) == (12, 2)
    assert (load.optimizer, load.attention) == ("adamw", "eager")
    found = predicted(distft.FSDP2(), tiny_config("M"), load, 2)
    memory = distft.FSDP2().memory(
        distft.ModelSpec.from_config(tiny_config("M")), load, world_size=2
    )
    assert found["model_state"] == memory.model_state_bytes
    offloaded = predicted(distft.ZeRO3(offload="params"), tiny_config("M"), load, 2)
    kept = predicted(distft.ZeRO3(), tiny_config("M"), load, 2)
    assert offloaded["model_state"] >= kept["model_state"] > 0
    with pytest.raises(ValueError, match="adafactor"):
        workload_of(model.config, arguments(optim="adafactor"), None, 40)


def test_a_page_shows_what_was_logged_and_needs_nothing_else(tmp_path):
    history = [{"step": step, "loss": 2.0 - step / 10, "num_tokens": step} for step in (1, 2, 3)]
    history += [{"step": 3, "eval_loss": math.nan}, {"step": 3, "eval_loss": 1.5}]
    write_report(tmp_path / "new" / "run.html", history, {"strategy": "FSDP2() on <2> ranks"})
    page = (tmp_path / "new" / "run.html").read_text()
    assert page.count("<svg") == 1
    assert page.count("<polyline") == 2
    assert "Run of 3 steps with FSDP2() on &lt;2&gt; ranks" in page
    assert "nan" not in page
    assert not {"<script", "<link", "src=", "href="} & set(page.split('"'))


def test_a_run_without_a_number_has_no_page(tmp_path):
    with pytest.raises(ValueError, match=r"0 numbers in 1 entries.*Train first"):
        write_report(tmp_path / "run.html", [{"step": 1}], {})
