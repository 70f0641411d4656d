"""Generation on every rank: the same tokens as one process, whoever stops first."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.optim import AdamW

import distft
from distft import DDP, FSDP2, HSDP, ZeRO1, ZeRO2, ZeRO3
from distft.testing import tiny_batches, tiny_model

SIX = [
    (DDP(), 2),
    (ZeRO1(), 2),
    (ZeRO2(), 2),
    (ZeRO3(), 2),
    (FSDP2(), 2),
    (HSDP(dp_replicate=2), 4),
]
SIX_IDS = [f"{strategy}@{ranks}" for strategy, ranks in SIX]


def prompt_of(rank):
    """Prompts of another number and length on each rank; the third rank has none."""
    rows = {0: 1, 1: 3, 2: 0, 3: 2}[rank]
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(3, 131, (rows, 4 + rank), generator=generator)


def settings_of(rank):
    return {"max_new_tokens": 3 + 5 * rank, "do_sample": False, "pad_token_id": 0}


def make(name, **changes):
    model = tiny_model(name, **changes)
    # Sharp logits: rounding does not choose the token.
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return model


def generate(strategy, name):
    distft.init()
    model, optimizer = strategy.apply(make(name, attention_dropout=0.5), partial(AdamW, lr=1e-3))
    prompt = prompt_of(strategy.dp_rank)
    mask = torch.ones_like(prompt)
    tokens = strategy.generate(
        model, input_ids=prompt, attention_mask=mask, **settings_of(strategy.dp_rank)
    )
    split = [
        isinstance(p, torch.distributed.tensor.DTensor) or getattr(p, "ds_status", None)
        for p in distft.unwrap(model).parameters()
    ]
    result = strategy.train_step(model, optimizer, tiny_batches([5]))
    return tokens, model.training, {str(state) for state in split}, result.loss


@pytest.mark.parametrize(("strategy", "ranks"), SIX, ids=SIX_IDS)
def test_ranks_with_other_prompts_generate_what_one_process_does(pools, strategy, ranks):
    answers = pools(ranks).run(generate, strategy, "Q")
    model = make("Q").eval()
    for rank, (tokens, training, split, loss) in enumerate(answers):
        prompt = prompt_of(rank)
        if len(prompt):
            mask = torch.ones_like(prompt)
            expected = model.generate(prompt, attention_mask=mask, **settings_of(rank))
            assert torch.equal(tokens, expected), f"rank {rank}"
        else:
            assert tokens.shape == prompt.shape
        assert training
        assert loss > 0
        if isinstance(strategy, FSDP2 | HSDP):
            assert split == {"True"}
        if isinstance(strategy, ZeRO3):
            assert split == {"ZeroParamStatus.NOT_AVAILABLE"}


def generate_alone(strategy):
    distft.init()
    model, _ = strategy.apply(make("L"), partial(AdamW, lr=1e-3))
    if strategy.dp_rank == 1:
        return None
    return strategy.generate(model, input_ids=prompt_of(0), **settings_of(0))


@pytest.mark.parametrize("strategy", [DDP(), ZeRO1(), ZeRO2()], ids=str)
def test_a_rank_that_holds_the_whole_model_may_generate_alone(pools, strategy):
    tokens, nothing = pools(2).run(generate_alone, strategy)
    assert torch.equal(tokens, make("L").eval().generate(prompt_of(0), **settings_of(0)))
    assert nothing is None


def failing_stop(*_):
    raise ValueError("a stopping criterion of rank 1 failed")


def generate_and_fail(strategy):
    distft.init()
    model, optimizer = strategy.apply(make("L"), partial(AdamW, lr=1e-3))
    more = {"stopping_criteria": [failing_stop]} if strategy.dp_rank == 1 else {}
    with pytest.raises(ValueError, match="criterion of rank 1") as caught:
        strategy.generate(model, input_ids=prompt_of(0), **settings_of(0), **more)
    strategy.train_step(model, optimizer, tiny_batches([5]))
    return str(caught.value)


@pytest.mark.parametrize("strategy", [FSDP2(), ZeRO3()], ids=str)
def test_an_error_on_one_rank_is_raised_on_all_and_nobody_waits(pools, strategy):
    assert len(set(pools(2).run(generate_and_fail, strategy))) == 1


def generate_without_a_head():
    distft.init()
    model, _ = DDP().apply(torch.nn.Linear(2, 2), partial(AdamW, lr=1e-3))
    with pytest.raises(ValueError, match=r"Linear has no generate\(\)"):
        DDP().generate(model, input_ids=prompt_of(0))


def test_a_model_that_cannot_generate_is_refused(pools):
    pools(2).run(generate_without_a_head)
