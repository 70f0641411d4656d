"""Models other than decoders: an image classifier and a text classifier, with their own loss."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.optim import AdamW

import distft
from distft import DDP, FSDP2, ZeRO3
from distft.spec import sharding_units
from distft.testing.runs import TrainingRecord, differences

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
STRATEGIES = [DDP(find_unused_parameters=True), FSDP2(), ZeRO3()]
NO_GRADIENT = [f"bert.encoder.layer.{layer}.attention.self.key.bias" for layer in (0, 1)]


def build(kind):
    """Return a tiny classifier of 5 classes from its config."""
    import transformers as hf

    torch.manual_seed(0)
    if kind == "dinov2":
        config = hf.Dinov2Config(**SIZES, image_size=28, patch_size=7, mlp_ratio=2, num_labels=5)
        return hf.Dinov2ForImageClassification(config)
    config = hf.BertConfig(
        **SIZES, vocab_size=131, intermediate_size=48, max_position_embeddings=32, num_labels=5
    )
    return hf.BertForSequenceClassification(config)


def rows_of(kind, num_rows, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 5, (num_rows,), generator=generator)
    if kind == "dinov2":
        return {
            "pixel_values": torch.randn((num_rows, 3, 28, 28), generator=generator),
            "labels": labels,
        }
    ids = torch.randint(0, 131, (num_rows, 12), generator=generator)
    mask = (torch.arange(12) < torch.randint(4, 13, (num_rows, 1), generator=generator)).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def batches_of(kind, step):
    """Return 4 micro-batches of other numbers of rows."""
    return [rows_of(kind, num_rows, 10 * step + num_rows) for num_rows in (3, 1, 2, 5)]


def summed(model, batch):
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return F.cross_entropy(model(**inputs).logits, batch["labels"], reduction="sum")


def averaged(model, batch):
    return summed(model, batch) / len(batch["labels"])


def count_rows(batch):
    return len(batch["labels"])


def train_alone(kind):
    """Return the record of one process, and its mean loss on other rows in the end."""
    model = build(kind).eval()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    losses, norms, gradients = [], [], {}
    for step in range(3):
        optimizer.zero_grad()
        loss = sum(summed(model, batch) / 11 for batch in batches_of(kind, step))
        loss.backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        gradients = gradients or {name: gradient.clone() for name, gradient in found.items()}
        norms.append(torch.stack([gradient.norm() for gradient in found.values()]).norm().item())
        losses.append(loss.item())
        optimizer.step()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    evaluated = sum(summed(model, batch).item() for batch in batches_of(kind, 9)) / 11
    return TrainingRecord(losses, norms, gradients, weights), evaluated


def train_under(strategy, kind):
    """The same on ranks; the first step is made of the pieces of a loop of one's own."""
    distft.init(seed=0)
    model, optimizer = strategy.apply(build(kind), partial(AdamW, lr=1e-3))
    # Dropout off: one process and two ranks draw other masks.
    model.eval()
    mine = [batches_of(kind, step)[strategy.dp_rank :: strategy.dp_size] for step in range(3)]
    total = strategy.count_loss_tokens(mine[0], count_rows)
    for batch, more in zip(mine[0], (True, False), strict=True):
        with strategy.no_sync(model) if more else nullcontext():
            strategy.backward(summed(model, batch) / total)
    gradients = strategy.gather_gradients(model)
    results = [
        strategy.train_step(model, optimizer, batches, loss_fn=summed, count_fn=count_rows)
        for batches in mine
    ]
    assert [result.num_loss_tokens for result in results] == [11, 11, 11]
    losses = [result.loss for result in results]
    norms = [result.grad_norm for result in results]
    weights = strategy.gather_weights(model)
    other = batches_of(kind, 9)[strategy.dp_rank :: strategy.dp_size]
    evaluated = strategy.eval_step(model, other, summed, count_rows).loss
    return TrainingRecord(losses, norms, gradients, weights), evaluated


@pytest.mark.parametrize("kind", ["dinov2", "bert"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_classifier_trains_as_on_one_process(pools, strategy, kind):
    expected, evaluated = train_alone(kind)
    for found, loss in pools(2).run(train_under, strategy, kind):
        # A token that masks patches is never used; a bias of keys moves all scores of a softmax
        # alike, so its gradient is 0 but for rounding.
        for name in ("dinov2.embeddings.mask_token", *NO_GRADIENT):
            for record in (found, expected):
                assert record.gradients.pop(name, torch.zeros(1)).abs().max() <= 1e-7, name
        assert differences(found, expected) == []
        assert loss == pytest.approx(evaluated, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "paths"),
    [
        ("dinov2", ["dinov2.encoder.layer.0", "dinov2.encoder.layer.1"]),
        ("bert", ["bert.encoder.layer.0", "bert.encoder.layer.1"]),
    ],
)
def test_a_sharding_unit_is_what_the_model_says_not_to_split(kind, paths):
    model = build(kind)
    units = sharding_units(model)
    assert set(paths) <= set(units)
    named = set(model._no_split_modules)
    assert all(type(model.get_submodule(unit)).__name__ in named for unit in units)


# ---- a loss function that returns a mean ----------------------------------------------------


def train_with_a_mean(strategy, num_rows):
    distft.init(seed=0)
    model, optimizer = strategy.apply(build("bert"), partial(AdamW, lr=1e-3))
    batch = rows_of("bert", num_rows, strategy.dp_rank)
    with pytest.raises(ValueError, match="so it is a mean, and the sum would be") as caught:
        strategy.train_step(model, optimizer, [batch], loss_fn=averaged, count_fn=count_rows)
    # Nothing is left behind, and the right loss is accepted.
    assert model.training
    result = strategy.train_step(model, optimizer, [batch], loss_fn=summed, count_fn=count_rows)
    assert result.loss > 0
    return str(caught.value)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("strategy", [DDP(), ZeRO3(), FSDP2()], ids=str)
def test_a_loss_that_is_a_mean_is_refused_alike_on_every_rank(pools, strategy, num_rows):
    """The rows of BERT run with dropout, which an evaluation mode keeps out of the comparison."""
    assert len(set(pools(2).run(train_with_a_mean, strategy, num_rows))) == 1


def first_step(strategy, loss_fn):
    """Return the losses of two steps and the random numbers drawn after them."""
    distft.init(seed=0)
    model, optimizer = strategy.apply(build("bert"), partial(AdamW, lr=1e-3))
    batch = rows_of("bert", 3, strategy.dp_rank)
    steps = [
        strategy.train_step(model, optimizer, [batch], loss_fn=loss_fn, count_fn=count_rows).loss
        for _ in range(2)
    ]
    return steps, torch.rand(1).item()


def noisy(model, batch):
    return summed(model, batch) * torch.rand(())


def nothing(model, batch):
    return summed(model, batch) * 0


def in_batch_contrast(model, batch):
    """Rows against each other, summed over rows: neither doubles nor stays."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    rows = F.normalize(model(**inputs).logits, dim=-1)
    targets = torch.arange(len(rows))
    return F.cross_entropy(rows @ rows.T / 0.1, targets, reduction="sum")


@pytest.mark.parametrize("loss_fn", [summed, noisy, nothing, in_batch_contrast])
def test_a_loss_that_is_not_a_mean_is_let_pass(pools, loss_fn):
    pools(2).run(first_step, FSDP2(), loss_fn)


def count_calls(strategy):
    distft.init(seed=0)
    model, optimizer = strategy.apply(build("bert"), partial(AdamW, lr=1e-3))
    calls = []

    def counted(model, batch):
        calls.append(len(batch["labels"]))
        return summed(model, batch)

    batch = rows_of("bert", 6, strategy.dp_rank)
    for _ in range(2):
        # A new function object every step, as a lambda in a loop is.
        strategy.train_step(
            model, optimizer, [batch], loss_fn=lambda m, b: counted(m, b), count_fn=count_rows
        )
    return calls


def test_a_loss_is_looked_at_once_and_costs_one_forward_pass_of_six_rows(pools):
    assert pools(2).run(count_calls, DDP()) == [[2, 4, 6, 6]] * 2


def late_rank(strategy):
    distft.init(seed=0)
    model, optimizer = strategy.apply(build("bert"), partial(AdamW, lr=1e-3))
    mine = [rows_of("bert", 2, 0)] if strategy.dp_rank == 0 else []
    step = partial(strategy.train_step, model, optimizer, loss_fn=averaged, count_fn=count_rows)
    step(mine)
    with pytest.raises(ValueError, match="so it is a mean"):
        step([rows_of("bert", 2, 0)])


def test_a_rank_without_a_batch_puts_the_look_off(pools):
    pools(2).run(late_rank, FSDP2())


def zero_everywhere(strategy):
    distft.init(seed=0)
    model, optimizer = strategy.apply(build("bert"), partial(AdamW, lr=1e-3))
    batch = rows_of("bert", 2, 0)
    with pytest.raises(ValueError, match="have 0 loss tokens on 2 ranks") as caught:
        strategy.train_step(model, optimizer, [batch], loss_fn=summed, count_fn=lambda _: 0)
    return str(caught.value)


def test_a_count_of_zero_everywhere_is_refused(pools):
    assert len(set(pools(2).run(zero_everywhere, FSDP2()))) == 1
