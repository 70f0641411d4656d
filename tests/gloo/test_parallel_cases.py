"""What goes wrong elsewhere under tensor and expert parallelism, each case with its right value."""

from __future__ import annotations

import pytest
import torch

from distft import DDP, EP, FSDP2, TP, NDParallel, ZeRO3, consolidate
from distft.testing import tiny_batches
from tests.gloo import parallel_jobs as jobs

THREE_HEADS = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3}


def relative(found, expected):
    return float((found - expected).norm()) / (float(expected.norm()) or 1.0)


# ---- gradients and norms ------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "model"), [(NDParallel(tp=2), "Q"), (EP(ep=2), "M")], ids=str)
def test_one_norm_over_two_meshes_is_that_of_one_process(pools, strategy, model):  # case 47
    found = pools(4).run(jobs.norms_on_every_rank, strategy, model)
    expected = pools(2).run(jobs.norms_on_every_rank, DDP(), model)[0]
    assert all(norms == found[0] for norms in found)
    assert found[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("strategy", "ranks"), [(TP(tp=2), 2), (TP(tp=4), 4)], ids=str)
def test_whole_parameters_count_once_in_the_norm(pools, strategy, ranks):  # case 48
    kv = {"num_key_value_heads": 4}
    expected = pools(2).run(jobs.norms_of_norms, DDP(), kv)[0]
    for norms in pools(ranks).run(jobs.norms_of_norms, strategy, kv):
        assert norms == pytest.approx(expected, rel=1e-5)


def test_head_norms_stay_the_same_on_every_rank_to_the_bit(pools):  # case 57
    found = pools(2).run(jobs.local_tensors_by_step, TP(tp=2), "Q", "norm")
    names = [name for name in found[0][0] if "q_norm" in name or "k_norm" in name]
    assert len(names) == 4
    for mine, theirs in zip(*found, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("grad_accum", [1, 2])
@pytest.mark.parametrize(
    ("strategy", "ranks"), [(DDP(), 2), (FSDP2(), 2), (EP(ep=2), 2), (TP(tp=2), 2)], ids=str
)
def test_the_router_moves_alike_on_any_ranks_and_micro_steps(
    pools, strategy, ranks, grad_accum
):  # case 64
    expected = pools(1).run(jobs.router_update, DDP(), 1)[0]
    gates = [name for name in expected if "gate" in name]
    assert float(torch.stack([expected[name].norm() for name in gates]).norm()) > 0.1
    for found in pools(ranks).run(jobs.router_update, strategy, grad_accum):
        for name, update in expected.items():
            assert relative(found[name], update) <= 1e-5, name


# ---- experts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [EP(ep=2), ZeRO3(), DDP()], ids=str)
@pytest.mark.parametrize("idle", [True, False], ids=["idle", "one rank only"])
def test_experts_without_tokens_neither_hang_nor_drift(pools, strategy, idle):  # case 62
    gradients, weights = jobs.few_experts_alone(idle)
    found = pools(2).run(jobs.few_experts, strategy, idle)
    for grads, whole, _, load in found:
        for name, expected in gradients.items():
            assert relative(grads[name], expected) <= 1e-5, name
        for name, expected in weights.items():
            assert (whole[name] - expected).abs().max() <= 1e-5, name
        unused = 2 if idle else 3
        assert float(grads["model.layers.0.mlp.experts.down_proj"][unused].abs().max()) == 0
        assert all(sum(layer.counts) == 2 * 8 * 16 for layer in load.layers)
        assert all(layer.dead == ((2, 3, 4, 5) if idle else (2, 3, 4)) for layer in load.layers)
    replicas = [local for _, _, local, _ in found]
    assert all(torch.equal(replicas[0][name], replicas[1][name]) for name in replicas[0])


@pytest.mark.parametrize(("strategy", "ranks"), [(EP(ep=2), 4), (NDParallel(tp=2, ep=2), 4)])
def test_experts_of_rank_0_reach_the_ranks_that_own_them(pools, strategy, ranks):  # case 61
    plain = jobs.indexed_experts()
    expected = plain(input_ids=tiny_batches([3])[0]["input_ids"]).logits
    for experts, logits in pools(ranks).run(jobs.experts_of_rank0, strategy):
        assert len(experts) == 4
        for tensor in experts.values():
            assert torch.equal(tensor[:, 0, 0], torch.arange(6.0) / 100)
            assert (tensor == tensor[:, :1, :1]).all()
        assert (logits - expected).abs().max() <= 1e-5


# ---- vocabulary ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "model", "changes"),
    [(2, "L", {}), (2, "Lt", {}), (3, "L", THREE_HEADS), (3, "Lt", THREE_HEADS)],
    ids=["L@2", "Lt@2", "L@3", "Lt@3"],
)
def test_a_vocabulary_that_does_not_divide_keeps_every_row(
    pools, tmp_path, ranks, model, changes
):  # case 55
    from transformers import AutoModelForCausalLM

    path = tmp_path / "checkpoint"
    for width, tied in pools(ranks).run(jobs.logits_width, TP(tp=ranks), model, str(path), changes):
        assert width == 131
        assert tied == (model == "Lt")
    consolidate(path, tmp_path / "model")
    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    hidden = changes.get("hidden_size", 32)
    assert loaded.lm_head.weight.shape == loaded.model.embed_tokens.weight.shape == (131, hidden)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == (model == "Lt")


# ---- what does not fit --------------------------------------------------------------------------

PLAN = {"model.layers.*.mlp.up_proj": "colwise"}
REFUSED = [
    (TP(tp=4), 4, "L", {}, ["4 heads", "2 key-value heads", "tp is 4", "Use tp=2"]),  # case 54
    (TP(tp=2), 2, "L", THREE_HEADS, ["3 heads", "3 key-value heads", "tp is 2"]),
    (NDParallel(tp=2), 4, "L", THREE_HEADS, ["3 heads", "tp is 2"]),
    (EP(ep=2), 2, "M", {"num_experts": 5}, ["5 experts", "ep is 2", "2 ranks"]),  # case 59
    (EP(ep=4), 4, "M", {}, ["6 experts", "ep is 4", "4 ranks"]),
    (EP(ep=2), 3, "M", {}, ["3 ranks", "ep=2"]),
    (EP(ep=2), 2, "L", {}, ["no experts", "ep is 2"]),
    (TP(tp=3), 2, "L", {}, ["3 ranks", "2"]),
    (TP(tp=2), 2, "M", {"moe_intermediate_size": 15}, ["two parts of 15", "tp is 2"]),
    # case 66
    (TP(tp=2, plan={"layers.*.mlp.up_proj": "colwise"}), 2, "L", {}, ["layers.*.mlp.up_proj"]),
    (TP(tp=2, plan={"model.layers.*.mlp.upproj": "colwise"}), 2, "L", {}, ["mlp.up_proj?"]),
    (TP(tp=2, plan={"model.layers.0.mlp.up_proj": "colwise"}), 2, "L", {}, ["match nothing"]),
    (TP(tp=2, plan={"model.layers.*.mlp.up_proj": "colwize"}), 2, "L", {}, ["'colwize'"]),
    (
        EP(ep=2, plan={"layers.*.mlp.experts": "ep_dispatch_experts"}),
        2,
        "M",
        {},
        ["layers.*.mlp.experts"],
    ),
]


@pytest.mark.parametrize(
    ("strategy", "ranks", "model", "changes", "words"), REFUSED, ids=lambda value: str(value)[:60]
)
def test_what_does_not_fit_is_refused_alike_on_every_rank(
    pools, strategy, ranks, model, changes, words
):
    found = pools(ranks).run(jobs.refusal, strategy, model, changes)
    assert all(text == found[0] for text in found)
    for word in words:
        assert word in found[0]


@pytest.mark.parametrize("call", ["train_step", "eval_step", "generate", "other counts"])
def test_rows_that_differ_inside_a_tp_group_are_refused_on_every_rank(pools, call):
    found = pools(2).run(jobs.refusal_of_rows, TP(tp=2), call)
    assert found[0] == found[1]
    assert "anks 0 and 1" in found[0]
    assert "strategy.dp_rank" in found[0]


@pytest.mark.parametrize(
    ("plan", "words"), [({"a": 1}, "no mapping"), ("colwise", "no mapping"), ([1], "no mapping")]
)
def test_a_plan_that_is_none_is_refused_where_it_is_written(plan, words):
    with pytest.raises(ValueError, match=words):
        TP(tp=2, plan=plan)


def test_ep_must_be_a_multiple_of_tp():
    with pytest.raises(ValueError, match=r"multiple of tp \(4\)"):
        NDParallel(tp=4, ep=2).mesh(8)


def test_a_model_without_a_plan_says_how_to_pass_one(pools):
    found = pools(2).run(jobs.refusal_without_plan, TP(tp=2))
    assert found[0] == found[1]
    assert "plan={" in found[0]


def test_a_plan_of_ones_own_trains_as_one_process(pools):
    from distft.testing.runs import Training, differences, train_alone, train_under

    plan = {f"model.layers.*.mlp.{name}_proj": "replicate" for name in ("gate", "up", "down")}
    training = Training("L", 3, 4)
    for found in pools(2).run(train_under, TP(tp=2, plan=plan), training):
        assert differences(found, train_alone(training)) == []
