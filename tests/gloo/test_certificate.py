"""The certificate: clean strategies pass, what cannot apply says so, and bad input is refused."""

from __future__ import annotations

import json

import pytest
from peft import LoraConfig

import distft
from distft import DDP, EP, FSDP2, HSDP, TP, NDParallel, ZeRO1, ZeRO2, ZeRO3
from distft.diagnose.parity import every_strategy
from tests.gloo import parity_models as models


def verdicts(certificate):
    return {result.strategy: result.status for result in certificate.results}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "Llama-3.2-1B"])
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_all_ten_strategies_pass(pools, model, tuning):
    workload = distft.Workload(tuning=tuning, lora_rank=4)
    certificate = distft.parity(model, "all", 4, workload, pool=pools(4))
    assert certificate.passed, str(certificate)
    no_experts = {"EP()", "NDParallel(tp=2, ep=2)"} if "A3B" not in model else set()
    assert {n for n, v in verdicts(certificate).items() if v == "not applicable"} == no_experts


def test_strategies_of_every_kind_pass_and_load_what_each_other_wrote(pools):
    strategies = [DDP(), ZeRO1(), ZeRO3(), FSDP2(), EP()]
    certificate = distft.parity(models.experts, strategies, 2, pool=pools(2))
    assert certificate.passed, str(certificate)
    assert {result.num_loads for result in certificate.results} == {len(strategies)}


def test_a_strategy_that_cannot_apply_says_why_and_does_not_fail(pools):
    certificate = distft.parity(
        models.dense, [FSDP2(), EP(), TP(tp=3), HSDP(dp_replicate=3)], 2, pool=pools(2)
    )
    assert certificate.passed
    assert list(verdicts(certificate).values()) == ["passed", *["not applicable"] * 3]
    assert "has no experts" in certificate.result(EP()).reason
    assert "3" in certificate.result(TP(tp=3)).reason


def test_adapters_that_the_users_code_attached_are_trained_as_in_one_process(pools):
    certificate = distft.parity(models.adapted, [ZeRO2(), TP()], 2, pool=pools(2))
    assert certificate.passed, str(certificate)
    assert certificate.model == "PeftModel"


def test_adapters_that_strategies_attach_are_trained_as_in_one_process(pools):
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.1)
    certificate = distft.parity(
        models.experts, [ZeRO3(), NDParallel(tp=2)], 2, peft_config=config, pool=pools(2)
    )
    assert certificate.passed, str(certificate)
    assert "LoraConfig(r=2)" in certificate.adapters


def test_a_model_and_a_loss_of_ones_own_are_compared_too(pools):
    certificate = distft.parity(
        models.classifier,
        [DDP(), FSDP2()],
        2,
        batches=models.four_rows,
        loss_fn=models.class_loss,
        count_fn=models.count_rows,
        pool=pools(2),
    )
    assert certificate.passed, str(certificate)


def test_the_certificate_is_json_and_a_page(pools):
    certificate = distft.parity(models.tied, [DDP(), EP()], 2, pool=pools(2))
    loaded = json.loads(certificate.to_json())
    assert loaded["passed"] is True
    assert loaded["results"][0]["strategy"] == "DDP()"
    assert {"torch", "transformers", "distft"} <= set(loaded["versions"])
    page = certificate.to_markdown()
    assert page.startswith("# Parity of LlamaForCausalLM: passed")
    assert "| `DDP()` | passed |" in page


def a_closure():
    return lambda: models.dense()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((lambda: None,), "Define it with `def` at the top level"),
        ((a_closure(),), "Define it with `def` at the top level"),
        ((models.dense(),), "A model that is built already cannot be made small"),
        ((models.raises,), "build_model raised KeyError: 'num_layer'"),
        ((models.nothing,), "build_model returned a dict"),
        ((models.classifier,), "has no vocab_size in its config"),
        (("Qwen/Qwen9",), "is none of the .* models"),
        ((models.dense, "everything"), "takes 'all' or a list"),
        ((models.dense, ["fsdp2"]), "1 of which are none, such as 'fsdp2'"),
        ((models.dense, [FSDP2(precision="bf16")]), "cannot tell a fault of 1 % from rounding"),
        ((models.dense, "all", 1), "at least 2 ranks"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_input_is_one_clear_error(pools, arguments, said):
    with pytest.raises(ValueError, match=said):
        distft.parity(*arguments, pool=pools(2))


def test_batches_that_ranks_cannot_share_are_refused(pools):
    with pytest.raises(ValueError, match=r"batches\(0\) returned 3 micro-batches for 2 ranks"):
        distft.parity(
            models.classifier,
            [DDP()],
            2,
            batches=models.three_rows,
            loss_fn=models.class_loss,
            count_fn=models.count_rows,
            pool=pools(2),
        )


def test_all_means_ten_strategies_on_a_multiple_of_four_ranks():
    assert len(set(every_strategy(4))) == len(set(every_strategy(8))) == 10
    for ranks in (2, 3, 4, 6, 8):
        for strategy in every_strategy(ranks):
            assert strategy.mesh(ranks).num_ranks == ranks
