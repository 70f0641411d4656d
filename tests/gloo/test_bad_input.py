"""Wrong calls: one clear error, the same on every rank, nothing left behind."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.optim import SGD, Adafactor, AdamW

import distft
from distft import DDP, FSDP2, HSDP, ZeRO1, ZeRO2, ZeRO3
from distft.testing import tiny_batches, tiny_model

ALL = [DDP(), ZeRO1(), ZeRO2(), ZeRO3(), FSDP2(), HSDP(dp_replicate=1)]


def error_of(function, *args):
    """Return kind and text of what a call raises, and whether a good step works afterwards."""
    try:
        function(*args)
    except (ValueError, RuntimeError) as error:
        kind, text = type(error).__name__, str(error)
    else:
        return "nothing", "", False
    # Nothing is left behind: the same ranks go on to train.
    model, optimizer = DDP().apply(tiny_model("L"), partial(SGD, lr=0.1))
    result = DDP().train_step(model, optimizer, tiny_batches([5]))
    return kind, text, result.loss > 0


def assert_refused(answers, kind, *parts):
    for rank, (found, text, works) in enumerate(answers):
        assert found == kind, f"rank {rank}: {found}: {text}"
        for part in parts:
            assert part in text, f"rank {rank}: {part!r} is not in {text!r}"
        assert works
    assert len({text for _, text, _ in answers}) == 1, "the same on every rank"


def apply(strategy, model=None, optimizer=None, **keywords):
    distft.init()
    return strategy.apply(
        model or tiny_model("L"), optimizer or partial(AdamW, lr=1e-3), **keywords
    )


def job_wrong_ranks(strategy):
    return error_of(apply, strategy)


def test_a_wrong_number_of_ranks_names_both_numbers(pools):
    answers = pools(3).run(job_wrong_ranks, HSDP(dp_replicate=2, dp_shard=2))
    assert_refused(answers, "ValueError", "needs 4 ranks, but there are 3", "Start 4 ranks")


def test_a_degree_that_does_not_divide_names_both_numbers(pools):
    answers = pools(3).run(job_wrong_ranks, HSDP(dp_replicate=2))
    assert_refused(answers, "ValueError", "multiple of 2 ranks, but there are 3", "Start 2 or 4")


def test_more_shards_than_ranks_names_both_numbers(pools):
    answers = pools(2).run(job_wrong_ranks, FSDP2(dp_shard=4))
    assert_refused(answers, "ValueError", "needs 4 ranks, but there are 2")


def job_data_parallel():
    return error_of(apply, DDP(), torch.nn.DataParallel(tiny_model("L")))


def test_a_model_in_data_parallel_is_refused(pools):
    assert_refused(pools(2).run(job_data_parallel), "ValueError", "nn.DataParallel", "plain model")


def job_distributed_already(first, second):
    model, _ = apply(first)
    return error_of(apply, second, model)


@pytest.mark.parametrize("second", [DDP(), ZeRO2(), FSDP2()], ids=str)
@pytest.mark.parametrize("first", ALL, ids=str)
def test_a_model_that_is_distributed_already_is_refused(pools, first, second):
    answers = pools(2).run(job_distributed_already, first, second)
    assert_refused(answers, "ValueError", "apply() got a model that is", "Pass the plain model")


def job_unwrapped_again(first):
    model, _ = apply(first)
    return error_of(apply, DDP(), distft.unwrap(model))


@pytest.mark.parametrize("first", ALL, ids=str)
def test_a_distributed_model_without_its_wrapper_is_refused_too(pools, first):
    answers = pools(2).run(job_unwrapped_again, first)
    assert_refused(answers, "ValueError", "apply() got a model that is")


def job_early_optimizer(strategy):
    model = tiny_model("L")
    return error_of(apply, strategy, model, AdamW(model.parameters(), lr=1e-3))


@pytest.mark.parametrize("strategy", ALL, ids=str)
def test_an_optimizer_built_before_sharding_is_refused(pools, strategy):
    answers = pools(2).run(job_early_optimizer, strategy)
    assert_refused(answers, "ValueError", "AdamW that was built before sharding", "partial(AdamW")


def job_foreign_optimizer(strategy):
    model = tiny_model("L")
    optimizer = AdamW(model.parameters(), lr=1e-3)
    model, _ = apply(strategy, model)
    return error_of(strategy.train_step, model, optimizer, tiny_batches([5]))


@pytest.mark.parametrize("strategy", [DDP(), ZeRO3(), FSDP2()], ids=str)
def test_a_step_with_an_optimizer_from_elsewhere_is_refused(pools, strategy):
    answers = pools(2).run(job_foreign_optimizer, strategy)
    assert_refused(answers, "ValueError", "AdamW as optimizer that no apply() returned")


def job_plain_model():
    return error_of(DDP().train_step, tiny_model("L"), None, tiny_batches([5]))


def test_a_step_with_a_model_that_was_not_applied_is_refused(pools):
    assert_refused(pools(2).run(job_plain_model), "ValueError", "as model that no apply() returned")


def job_other_optimizer(factory):
    return error_of(apply, FSDP2(), None, factory)


def test_an_optimizer_that_sharding_changes_is_refused_by_name(pools):
    answers = pools(2).run(job_other_optimizer, partial(Adafactor, lr=1e-3))
    assert_refused(answers, "ValueError", "Adafactor factors the second moment", "elementwise")


def job_different_models():
    import torch.distributed as dist

    layers = 2 + dist.get_rank()
    return error_of(apply, DDP(), tiny_model("L", num_hidden_layers=layers))


def test_ranks_with_different_models_are_told_so_everywhere(pools):
    answers = pools(2).run(job_different_models)
    assert_refused(answers, "ValueError", "Rank 0 has a model of 23904 parameters, and rank 1")


def job_meta():
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    return error_of(apply, FSDP2(), model)


def test_a_model_without_values_is_refused(pools):
    answers = pools(2).run(job_meta)
    assert_refused(answers, "ValueError", "2 of 2 parameters are on the meta device", "weight")


def job_groups(kind):
    model = tiny_model("L")
    names = [name for name, _ in model.named_parameters()]
    groups = {
        "missing": [{"params": names[:-1]}],
        "twice": [{"params": names}, {"params": names[:1]}],
        "foreign": [{"params": [torch.nn.Parameter(torch.zeros(3))]}],
        "unknown": [{"params": ["not.there"]}],
        "no params": [{"lr": 1.0}],
    }[kind]
    return error_of(partial(apply, DDP(), model, param_groups=groups))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("missing", "1 of 21 trainable parameters are in no group, such as lm_head.weight"),
        ("twice", "param_groups[1] repeats model.embed_tokens.weight"),
        ("foreign", "param_groups[0] holds a tensor of shape (3,)"),
        ("unknown", "param_groups[0] holds not.there"),
        ("no params", "param_groups[0] has no `params`"),
    ],
)
def test_wrong_parameter_groups_are_named(pools, kind, text):
    assert_refused(pools(2).run(job_groups, kind), "ValueError", text)


def job_frozen():
    model = tiny_model("L").requires_grad_(False)
    return error_of(apply, DDP(), model)


def test_a_model_with_nothing_to_train_is_refused(pools):
    assert_refused(pools(2).run(job_frozen), "ValueError", "0 that require gradients")


def job_step(batches, keywords):
    model, optimizer = apply(DDP())
    return error_of(partial(DDP().train_step, model, optimizer, batches, **keywords))


@pytest.mark.parametrize(
    ("batches", "keywords", "text"),
    [
        ([], {}, "0 micro-batches on each of 2 ranks"),
        (tiny_batches([0, 0]), {}, "4 micro-batches of this step have 0 loss tokens on 2 ranks"),
        (tiny_batches([5]), {"max_grad_norm": 0.0}, "max_norm is 0.0"),
        (tiny_batches([5]), {"max_grad_norm": float("nan")}, "max_norm is nan"),
    ],
    ids=["no batch", "no loss token", "zero bound", "nan bound"],
)
def test_a_step_that_has_no_mean_is_refused(pools, batches, keywords, text):
    assert_refused(pools(2).run(job_step, batches, keywords), "ValueError", text)


def job_no_labels():
    model, optimizer = apply(DDP())
    batch = {"input_ids": torch.zeros(1, 4, dtype=torch.long)}
    return error_of(DDP().train_step, model, optimizer, [batch])


def test_a_batch_without_labels_is_refused(pools):
    assert_refused(pools(2).run(job_no_labels), "ValueError", "no `labels`")


def job_batches(dataset, sizes):
    return error_of(partial(DDP().batches, dataset, **sizes))


@pytest.mark.parametrize(
    ("dataset", "sizes", "text"),
    [
        ([], {}, "0 rows"),
        ([1], {"micro_batch": 0}, "micro_batch=0"),
        ([1], {"grad_accum": 1.5}, "grad_accum=1.5"),
    ],
)
def test_batches_of_nothing_are_refused(pools, dataset, sizes, text):
    assert_refused(pools(2).run(job_batches, dataset, sizes), "ValueError", text)
