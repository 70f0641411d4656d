"""Faults of the kinds that trained wrongly in silence somewhere: parity names each culprit."""

from __future__ import annotations

import pytest
from peft import LoraConfig

import distft
from distft import FSDP2, ZeRO1
from distft.testing import WorkerPool
from tests.gloo import faulty
from tests.gloo import parity_models as models

# Strategy, model, and the first thing that is said: stage, quantity, tensor and ranks.
SILENT = [
    (faulty.AveragedTwice(), models.dense, "at step 0", "gradient", "model.embed_tokens", (0, 1)),
    (faulty.MeanOfEachRank(), models.dense, "at step 0", "loss", "", (0, 1)),
    (faulty.NeverReduced(), models.dense, "at step 0", "gradient", "model.embed_tokens", (0, 1)),
    (faulty.KeepsOnlyTheLast(), models.dense, "at step 0", "gradient", "model.embed", (0, 1)),
    (faulty.ForgetsTheNorms(), models.dense, "after apply", "weight", faulty.NORM, (1,)),
    (faulty.Divides(), models.dense, "at step 0", "gradient", "model.embed_tokens", (0, 1)),
    (faulty.SumsInTP(), models.dense, "at step 0", "gradient", faulty.NORM, (0, 1)),
    (faulty.ComputesInBf16(), models.dense, "at step 0", "loss", "", (0, 1)),
    (faulty.OptimizerFirst(), models.dense, "after step 0", "weight", "model.embed", (0, 1)),
    (faulty.Unties(), models.tied, "after apply", "weight", "lm_head.weight", (0, 1)),
    (faulty.EveryRankItsOwn(), models.dense, "after apply", "weight", "model.embed", (1,)),
    (faulty.StaleBuffer(), models.dense, "after apply", "buffer", "model.rotary_emb", (1,)),
    (faulty.ExpertsSwapped(), models.experts, "after apply", "weight",
     "model.layers.0.mlp.experts.gate_up_proj", (0, 1)),
    (faulty.PartialNorm(), models.dense, "at step 0", "norm", "", (0, 1)),
    (faulty.DoesNotClip(), models.dense, "at step 0", "clipped gradient", "model.embed", (0, 1)),
    (faulty.NoDecay(), models.dense, "after step 0", "weight", "model.layers.0.input", (0, 1)),
    (faulty.MomentsInBf16(), models.dense, "in the saved files", "moment", "exp_avg of", (0,)),
    (faulty.SkipsABatch(), models.dense, "at step 2", "loss", "", (0, 1)),
    (faulty.DriftsApart(), models.dense, "after step 1", "weight", "model.embed", (1,)),
    (faulty.SavesInBf16(), models.dense, "in the saved files", "weight", "model.embed", (0,)),
    (faulty.WrongRanksFile(), models.dense, "after the load", "weight", faulty.DOWN, (0, 1)),
    (faulty.LoadsNoWeights(), models.dense, "after the load", "weight", "model.embed", (0, 1)),
    (faulty.LoadsNoMoments(), models.dense, "and a step", "weight", "model.embed", (0, 1)),
    (faulty.ForgetsTheStep(), models.dense, "and a step", "weight", "model.embed", (0, 1)),
]  # fmt: skip


def assert_first(result, when, quantity, name, ranks):
    """Check that what is named first is the culprit."""
    assert result.differences, str(result)
    assert result.status == "failed", str(result)
    first = result.differences[0]
    assert when in first.when, str(result)
    assert first.quantity == quantity, str(result)
    assert first.name.startswith(name), str(result)
    assert first.ranks == ranks, str(result)
    assert first.error > first.tolerance, str(result)


@pytest.mark.parametrize(
    ("strategy", "model", "when", "quantity", "name", "ranks"),
    SILENT,
    ids=[type(case[0]).__name__ for case in SILENT],
)
def test_a_silent_fault_is_found_and_its_culprit_named(
    pools, strategy, model, when, quantity, name, ranks
):
    certificate = distft.parity(model, strategy, 2, pool=pools(2))
    assert not certificate.passed
    assert_first(certificate.results[0], when, quantity, name, ranks)


def test_adapters_that_came_after_sharding_are_found(pools):
    config = LoraConfig(r=2, target_modules=["q_proj"])
    strategy = faulty.AdaptersLast()
    certificate = distft.parity(models.dense, strategy, 2, peft_config=config, pool=pools(2))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A"
    assert_first(certificate.results[0], "at step 0", "gradient", name, (0, 1))


def test_a_load_that_is_wrong_for_one_source_alone_names_the_source(pools):
    strategy = faulty.LoadsOthersWrongly()
    certificate = distft.parity(models.experts, [ZeRO1(), strategy], 2, pool=pools(2))
    assert [result.status for result in certificate.results] == ["passed", "failed"]
    name = "model.layers.0.mlp.experts.down_proj"
    when = "after the load of the checkpoint of ZeRO1()"
    assert_first(certificate.result(strategy), when, "weight", name, (0, 1))


def test_ranks_of_a_tp_group_with_rows_of_their_own_are_found(pools):
    result = distft.parity(models.dense, faulty.OtherRowsInTP(), 2, pool=pools(2)).results[0]
    assert result.status == "failed"
    assert "ValueError" in result.reason
    assert "one tp group, which works on the same rows" in result.reason


def test_ranks_that_raise_die_or_wait_fail_their_strategy_and_the_rest_go_on():
    strategies = [faulty.Raises(), faulty.Dies(), faulty.SavesOnOneRank(), FSDP2()]
    with WorkerPool(2, env={"DISTFT_RENDEZVOUS_TIMEOUT": "4"}) as pool:
        certificate = distft.parity(models.dense, strategies, 2, pool=pool)
        hung = distft.parity(models.dense, faulty.Hangs(), 2, timeout=20, pool=pool).results[0]
    raises, dies, saves, clean = certificate.results
    assert raises.first.startswith("rank 1, in step 1: ArithmeticError: rank 1 had enough")
    assert dies.first.startswith("rank 1, in step 1: RuntimeError: The rank's process ended.")
    assert "Strategy.save was called on 1 of 2 ranks" in saves.first
    assert clean.status == "passed"
    assert not certificate.passed
    assert hung.first.startswith("ranks did not come back in 20 s: rank 0, in step 1, rank 1, in")
    # The stack of the rank that is somewhere else.
    assert "faulty.py" in hung.reason
