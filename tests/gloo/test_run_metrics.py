"""What a run of the Trainer says of itself, and the test of a save after its first step."""

from __future__ import annotations

import json

import pytest

from distft import DDP, EP, FSDP2, ZeRO1, ZeRO3
from tests.gloo import metrics_jobs as jobs

TRLS = ("loss", "grad_norm", "num_tokens", "mean_token_accuracy", "entropy", "learning_rate")


def steps(history):
    return [entry for entry in history if "loss" in entry]


def last(history, key):
    return [entry[f"distft/{key}"] for entry in history if f"distft/{key}" in entry][-1]


@pytest.mark.parametrize("strategy", [FSDP2(), ZeRO3()], ids=str)
def test_speed_memory_traffic_and_waiting_are_in_log_lines_and_report(pools, tmp_path, strategy):
    found = pools(2).run(jobs.run, tmp_path, strategy, "L", {})
    history, page = found[0]
    assert [entry["step"] for entry in steps(history)] == [2, 4, 6, 8, 10, 12]
    speed, per_rank = (
        last(history, "tokens_per_second"),
        last(history, "tokens_per_second_per_rank"),
    )
    assert speed == pytest.approx(2 * per_rank, rel=1e-3)
    assert speed > 0
    # Both to the byte, rounded to four digits in the log.
    assert last(history, "model_state_gb") == last(history, "model_state_predicted_gb") > 0
    # What TRL gathers for its own log is sent too.
    assert (
        1 <= last(history, "sent_per_step_gb") / last(history, "sent_per_step_predicted_gb") < 1.1
    )
    assert 0 <= last(history, "communication_share") <= 1
    peaks = [entry["step"] for entry in history if "distft/peak_memory_gb" in entry]
    assert peaks == [2, 4, 10]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["batch"] == "8 rows a step: 2 a micro-batch x 2 data ranks x 2 micro-steps"
    assert [len(line["peak_memory_bytes"]) for line in lines if line.get("event") == "ranks"] == [
        2
    ] * 3
    logged = [line for line in lines if "loss" in line]
    for line, entry in zip(logged, steps(history), strict=True):
        assert {k: line[k] for k in entry if k not in ("epoch",)} == {
            k: entry[k] for k in entry if k not in ("epoch",)
        }
    for part in (
        "<svg",
        "Loss (nats per loss token)",
        type(strategy).__name__,
        "sent by a rank per step",
    ):
        assert part in page
    assert "<script" not in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_a_run_is_the_same_to_the_bit_with_and_without_its_smoke_test(pools, tmp_path):
    for strategy in (ZeRO1(), ZeRO3(), FSDP2()):
        folder = tmp_path / type(strategy).__name__
        changes = {"max_steps": 3, "logging_steps": 1}
        with_test = pools(2).run(jobs.run, folder, strategy, "L", changes)[0][0]
        assert not (folder / ".distft-smoke-test").exists()
        changes["save_strategy"] = "no"
        without = pools(2).run(jobs.run, folder / "without", strategy, "L", changes)[0][0]
        for one, other in zip(steps(with_test), steps(without), strict=True):
            assert {key: one[key] for key in TRLS} == {key: other[key] for key in TRLS}, strategy


def test_a_load_that_brings_nothing_back_ends_the_run_after_one_step(pools, tmp_path):
    for message, step in pools(2).run(jobs.refused, tmp_path, jobs.Forgetful()):
        assert "came back different" in message
        assert "smoke_test=False" in message
        assert step == 1


def test_a_disk_that_does_not_write_ends_the_run_after_one_step_on_every_rank(pools, tmp_path):
    (tmp_path / ".distft-smoke-test").write_text("in the way")
    found = pools(2).run(jobs.refused, tmp_path, FSDP2())
    assert found[0] == found[1]
    assert "FileExistsError" in found[0][0]


def test_another_batch_than_before_is_said_when_a_run_goes_on(pools, tmp_path):
    for facts in pools(2).run(jobs.continued, tmp_path, DDP()):
        assert facts["batch"].startswith("4 rows a step: 2 a micro-batch x 2 data ranks x 1 ")
        assert "trained with 8 rows a step" in facts["batch changed"]


def test_experts_are_counted_in_every_log_and_each_of_them_in_the_lines(pools, tmp_path):
    history, page = pools(2).run(
        jobs.run, tmp_path, EP(ep=2), "M", {"max_steps": 4, "save_strategy": "no"}
    )[0]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    counted = [line for line in lines if line.get("event") == "experts"]
    assert [line["step"] for line in counted] == [2, 4]
    for line, entry in zip(counted, steps(history), strict=True):
        layers = line["tokens"].values()
        assert {len(counts) for counts in layers} == {6}
        # Each token goes to two experts in each layer.
        assert len({sum(counts) for counts in layers}) == 1
        assert entry["distft/dead_experts"] == sum(counts.count(0) for counts in layers)
        worst = max(6 * max(counts) / sum(counts) for counts in layers)
        assert entry["distft/expert_imbalance"] == pytest.approx(worst, rel=1e-3)
        assert 1 <= entry["distft/expert_slowdown"] <= worst
    assert "Experts without a token" in page
    assert "auxiliary loss" in page
