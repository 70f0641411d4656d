"""The loss without an update: a mean over loss tokens, every row once, nothing left behind."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD, AdamW

import distft
from distft import DDP, FSDP2, HSDP, ZeRO1, ZeRO2, ZeRO3
from distft.testing import tiny_batches, tiny_model
from distft.training.data import pad_rows
from distft.training.loss import count_next_tokens, next_token_loss

SIX = [
    (DDP(), 2),
    (ZeRO1(), 2),
    (ZeRO2(), 2),
    (ZeRO3(), 2),
    (FSDP2(), 2),
    (HSDP(dp_replicate=2), 4),
]
SIX_IDS = [f"{strategy}@{ranks}" for strategy, ranks in SIX]
LENGTHS = [16, 5, 9, 3, 12, 7, 4, 14, 2]


def apply_tiny(strategy, name="L", **changes):
    distft.init(seed=0)
    return strategy.apply(tiny_model(name, **changes), partial(AdamW, lr=1e-3))


def nine_rows():
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randint(0, 131, (length,), generator=generator) for length in LENGTHS]
    return [{"input_ids": row, "labels": row} for row in rows]


def evaluate_rows(strategy, micro_batch):
    model, _ = apply_tiny(strategy)
    return strategy.evaluate(model, nine_rows(), micro_batch=micro_batch)


@pytest.mark.parametrize(("strategy", "ranks"), SIX, ids=SIX_IDS)
def test_nine_rows_in_batches_of_five_count_once_each(pools, strategy, ranks):
    """GRAD-10: a last batch filled with repeated rows would bias the mean."""
    model = tiny_model("L")
    with torch.no_grad():
        total = sum(next_token_loss(model, pad_rows([row])) for row in nine_rows()).item()
    tokens = sum(LENGTHS) - len(LENGTHS)
    answers = pools(ranks).run(evaluate_rows, strategy, 5)
    assert len({answer.loss for answer in answers}) == 1
    assert answers[0].loss == pytest.approx(total / tokens, rel=1e-6)
    assert (answers[0].num_loss_tokens, answers[0].num_tokens) == (tokens, sum(LENGTHS))


def uneven_eval(strategy):
    model, _ = apply_tiny(strategy)
    batches = tiny_batches([3, 11, 7, 2, 5])
    mine = batches[:4] if strategy.dp_rank == 0 else batches[4:][: strategy.dp_rank == 1]
    return strategy.eval_step(model, mine)


@pytest.mark.parametrize(("strategy", "ranks"), SIX, ids=SIX_IDS)
def test_ranks_may_have_different_numbers_of_batches_or_none(pools, strategy, ranks):
    model, batches = tiny_model("L"), tiny_batches([3, 11, 7, 2, 5])
    with torch.no_grad():
        expected = sum(next_token_loss(model, batch) for batch in batches).item() / 28
    for answer in pools(ranks).run(uneven_eval, strategy):
        assert answer.loss == pytest.approx(expected, rel=1e-6)
        assert answer.num_loss_tokens == 28


def is_split(parameter):
    """Return whether a rank holds only its part of a parameter now."""
    if hasattr(parameter, "ds_status"):
        return parameter.ds_status.name == "NOT_AVAILABLE"
    return isinstance(parameter, torch.distributed.tensor.DTensor)


def look_and_train(strategy, look):
    model, optimizer = apply_tiny(strategy, attention_dropout=0.5)
    unwrapped = distft.unwrap(model)
    unwrapped.model.layers[0].eval()
    seen = []
    for step in range(3):
        torch.manual_seed(step)
        optimizer.zero_grad()
        if look:
            before = [module.training for module in model.modules()]
            first = strategy.eval_step(model, tiny_batches([9]))
            assert strategy.eval_step(model, tiny_batches([9])) == first, "no dropout"
            assert [module.training for module in model.modules()] == before
            assert all(p.grad is None for p in unwrapped.parameters())
            seen.append(all(is_split(p) for p in unwrapped.parameters()))
        result = strategy.train_step(model, optimizer, tiny_batches([5], seed=step))
        seen.append(result.loss)
    dist.barrier()
    return seen[::2] if look else [], seen[1::2] if look else seen


@pytest.mark.parametrize(
    ("strategy", "ranks"), [*SIX, (FSDP2(reshard_after_forward=False), 2)], ids=str
)
def test_an_evaluation_between_steps_leaves_nothing_behind(pools, strategy, ranks):
    """Mode, gradients, sharding, random state and the next losses are as without it."""
    plain = pools(ranks).run(look_and_train, strategy, False)
    splits = not isinstance(strategy, DDP | ZeRO1 | ZeRO2)
    for (split, losses), (_, expected) in zip(
        pools(ranks).run(look_and_train, strategy, True), plain, strict=True
    ):
        assert losses == expected
        if splits:
            assert split == [True, True, True]


def refused(strategy, batches):
    model, _ = apply_tiny(strategy)
    with pytest.raises(ValueError, match=r"^eval_step ") as caught:
        strategy.eval_step(model, batches)
    training = model.training
    again = strategy.eval_step(model, tiny_batches([5])).num_loss_tokens
    return str(caught.value), training, again


@pytest.mark.parametrize(
    ("batches", "text"),
    [([], "0 micro-batches on each of 2 ranks"), (tiny_batches([0]), "0 loss tokens")],
    ids=["no batch", "no loss token"],
)
@pytest.mark.parametrize("strategy", [DDP(), FSDP2()], ids=str)
def test_an_evaluation_without_a_mean_is_refused_alike_on_every_rank(
    pools, strategy, batches, text
):
    answers = pools(2).run(refused, strategy, batches)
    assert len(set(answers)) == 1
    message, training, tokens = answers[0]
    assert text in message
    assert training
    assert tokens == 10


def foreign_model():
    distft.init()
    with pytest.raises(ValueError, match="as model that no apply"):
        DDP().eval_step(tiny_model("L"), tiny_batches([5]))


def test_a_model_that_was_not_applied_is_refused(pools):
    pools(2).run(foreign_model)


# ---- RESH-11: schedulers --------------------------------------------------------------------


def decay(strategy, first, last, load_from=None, save_to=None):
    """Return lr at each step of a linear decay over 10 steps."""
    distft.init()
    model, optimizer = strategy.apply(tiny_model("L"), partial(SGD, lr=0.5))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)
    if load_from:
        strategy.load(load_from, model, optimizer, scheduler=scheduler)
    rates = []
    for step in range(first, last):
        rates.append(optimizer.param_groups[0]["lr"])
        strategy.train_step(model, optimizer, tiny_batches([5], seed=step))
        scheduler.step()
    rates.append(optimizer.param_groups[0]["lr"])
    if save_to:
        strategy.save(save_to, model, optimizer, step=last, scheduler=scheduler)
    return rates


@pytest.mark.parametrize("strategy", [DDP(), FSDP2()], ids=str)
def test_the_learning_rate_does_not_depend_on_ranks_or_a_resume(pools, strategy, tmp_path):
    """RESH-11: a scheduler stepped once per process would end early; W=2 stops, W=4 resumes."""
    expected = [pytest.approx(0.5 * (1 - step / 10)) for step in range(11)]
    for ranks in (1, 2, 4):
        for rates in pools(ranks).run(decay, strategy, 0, 10):
            assert rates == expected
    path = str(tmp_path / "five")
    pools(2).run(decay, strategy, 0, 5, None, path)
    for rates in pools(4).run(decay, strategy, 5, 10, path):
        assert rates == expected[5:]


def count_default(batch):
    return count_next_tokens(batch)


def own_loss(strategy):
    model, _ = apply_tiny(strategy)
    mine = tiny_batches([3, 11])[strategy.dp_rank :: strategy.dp_size]
    same = strategy.eval_step(model, mine, next_token_loss, count_default)
    return same == strategy.eval_step(model, mine)


def test_a_loss_and_a_count_of_ones_own_are_used(pools):
    assert pools(2).run(own_loss, DDP()) == [True, True]
