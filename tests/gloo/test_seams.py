"""Seams that were open once: what a sceptic tried, with the right value of each."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import distft
from distft import DDP, FSDP2, HSDP, ModelSpec, Workload, ZeRO1, ZeRO2, ZeRO3
from distft.measure import count_collectives
from distft.testing import tiny_batches, tiny_model
from distft.training.loss import count_next_tokens, next_token_loss

ZEROS = [ZeRO1(), ZeRO2(), ZeRO3()]
SIX = [*[(s, 2) for s in (DDP(), *ZEROS, FSDP2())], (HSDP(dp_replicate=2), 4)]
IDS = [f"{strategy}@{ranks}" for strategy, ranks in SIX]


class TwoHeads(nn.Module):
    """A body and two heads, one of which works on a batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 5)
        self.heads = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)])
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, x, head):
        return self.heads[head](torch.tanh(self.body(x * self.scale)))


def head_loss(model, batch):
    return model(batch["x"], batch["head"]).square().sum()


def rows_of(batch):
    return len(batch["x"])


def head_batches(heads, seed):
    generator = torch.Generator().manual_seed(seed)
    return [{"x": torch.randn(2, 6, generator=generator), "head": head} for head in heads]


def alone(windows, optimizer):
    """Return norms of one process over windows of batches, and its weights."""
    model = TwoHeads()
    stepper = optimizer(model.parameters())
    norms = []
    for window in windows:
        stepper.zero_grad()
        total = sum(rows_of(batch) for batch in window)
        for batch in window:
            (head_loss(model, batch) / total).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        stepper.step()
    return norms, {name: p.detach() for name, p in model.named_parameters()}


def under(strategy, heads_by_step, optimizer):
    distft.init()
    model, stepper = strategy.apply(TwoHeads(), optimizer)
    norms = []
    for step, heads in enumerate(heads_by_step):
        window = head_batches(heads * strategy.dp_size, step)
        # Micro-batch m of the window goes to rank m mod N, so each rank sees each head in turn.
        window = [b for head in heads for b in window if b["head"] == head]
        mine = window[strategy.dp_rank :: strategy.dp_size]
        result = strategy.train_step(model, stepper, mine, 0.5, head_loss, rows_of)
        norms.append(result.grad_norm)
    return norms, strategy.gather_weights(model)


def windows(heads_by_step, ranks):
    found = []
    for step, heads in enumerate(heads_by_step):
        window = head_batches(heads * ranks, step)
        found.append([b for head in heads for b in window if b["head"] == head])
    return found


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [*((s, n) for s, n in SIX if s != DDP()), (DDP(find_unused_parameters=True), 2)],
    ids=str,
)
@pytest.mark.parametrize(
    "heads", [[[0], [1], [0]], [[0, 1], [0, 1]], [[0, 0], [1, 0]]], ids=["turns", "both", "mixed"]
)
def test_a_parameter_without_a_gradient_in_some_micro_steps_trains_like_one_process(
    pools, strategy, ranks, heads
):
    optimizer = partial(SGD, lr=0.1)
    norms, weights = alone(windows(heads, ranks), optimizer)
    for found_norms, found in pools(ranks).run(under, strategy, heads, optimizer):
        assert found_norms == pytest.approx(norms, rel=1e-5)
        for name, expected in weights.items():
            torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-6)


def bytes_with_unused():
    strategy = DDP(find_unused_parameters=True)
    distft.init()
    model, optimizer = strategy.apply(tiny_model("L"), partial(SGD, lr=0.1))
    for step in range(3):
        with count_collectives() as made:
            strategy.train_step(model, optimizer, tiny_batches([5], seed=step))
    return made.wire_bytes


def test_finding_unused_parameters_costs_what_traffic_says(pools):
    report = DDP(find_unused_parameters=True).traffic(
        ModelSpec.from_model(tiny_model("L")), Workload(seq_len=16), world_size=2
    )
    assert pools(2).run(bytes_with_unused) == [report.bytes_per_step] * 2


def recover(strategy):
    distft.init()
    model, optimizer = strategy.apply(tiny_model("L"), partial(AdamW, lr=1e-3))
    batch = tiny_batches([9])[0]

    def infinite(model, batch):
        return next_token_loss(model, batch) * float("inf")

    steps = [
        strategy.train_step(model, optimizer, [batch], 1.0, loss, count_next_tokens)
        for loss in (next_token_loss, infinite, next_token_loss, next_token_loss)
    ]
    return [step.skipped for step in steps], steps[-1].grad_norm


@pytest.mark.parametrize(("strategy", "ranks"), SIX, ids=IDS)
def test_one_step_that_is_not_finite_spoils_no_later_one(pools, strategy, ranks):
    for skipped, norm in pools(ranks).run(recover, strategy):
        assert skipped == [False, True, False, False]
        assert norm == norm


def look_before_the_norm(strategy, look):
    distft.init()
    model, _ = strategy.apply(tiny_model("L"), partial(SGD, lr=0.1))
    batch = tiny_batches([9])[0]
    strategy.backward(next_token_loss(model, batch) / 9)
    if look:
        with torch.no_grad():
            next_token_loss(model, batch)
    gradients = strategy.gather_gradients(model)
    return strategy.clip_grad_norm_(model, 0.1), sorted(gradients)


@pytest.mark.parametrize("strategy", [DDP(), ZeRO3(), FSDP2()], ids=str)
def test_a_look_between_backward_and_clipping_loses_no_gradient(pools, strategy):
    plain = pools(2).run(look_before_the_norm, strategy, False)
    assert pools(2).run(look_before_the_norm, strategy, True) == plain


def interrupted(strategy):
    distft.init()
    model, optimizer = strategy.apply(tiny_model("L"), partial(SGD, lr=0.1))

    def failing(model, batch):
        loss = next_token_loss(model, batch)
        if torch.is_grad_enabled():
            raise KeyError("no such row")
        return loss

    texts = []
    for loss in (failing, next_token_loss):
        try:
            strategy.train_step(model, optimizer, tiny_batches([9]), None, loss, count_next_tokens)
        except (KeyError, RuntimeError) as error:
            texts.append(str(error))
    return texts


@pytest.mark.parametrize("strategy", [DDP(), FSDP2(defer_reduce=True), ZeRO2()], ids=str)
def test_after_an_interrupted_window_the_model_is_refused(pools, strategy):
    for first, second in pools(2).run(interrupted, strategy):
        assert "no such row" in first
        assert "interrupted between its micro-batches by KeyError" in second
        assert "load the last checkpoint" in second


def one_rank_cannot_count():
    distft.init()
    model, optimizer = DDP().apply(tiny_model("L"), partial(SGD, lr=0.1))
    batch = dict(tiny_batches([9])[0])
    if DDP().dp_rank == 1:
        del batch["labels"]
    try:
        DDP().train_step(model, optimizer, [batch])
    except ValueError as error:
        text = str(error)
    return text, DDP().train_step(model, optimizer, tiny_batches([9])).loss > 0


def test_a_batch_without_labels_on_one_rank_is_an_error_on_all(pools):
    answers = pools(2).run(one_rank_cannot_count)
    assert answers[0] == answers[1]
    assert "no `labels`" in answers[0][0]
    assert "(on rank 1)" in answers[0][0]


def loss_per_row(model, batch):
    return next_token_loss(model, batch).repeat(2)


def rows_of_ids(batch):
    return len(batch["input_ids"])


def wrong_step(kind):
    distft.init()
    model, optimizer = DDP().apply(tiny_model("L"), partial(SGD, lr=0.1))
    batch = tiny_batches([9])[0]
    arguments = {
        "one batch": (batch,),
        "one batch, own loss": (batch, None, next_token_loss, count_next_tokens),
        "half a token": ([batch], None, next_token_loss, lambda _: 0.5),
        "a loss per row": ([batch], None, loss_per_row, rows_of_ids),
    }[kind]
    with pytest.raises(ValueError, match=r".*") as info:
        DDP().train_step(model, optimizer, *arguments)
    return str(info.value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("one batch", "one batch with the fields input_ids, labels"),
        ("one batch, own loss", "one batch with the fields input_ids, labels"),
        ("half a token", "count_fn returned 0.5"),
        ("a loss per row", "loss_fn returned a tensor of shape (2,)"),
    ],
)
def test_a_step_of_the_wrong_form_says_so(pools, kind, text):
    for found in pools(2).run(wrong_step, kind):
        assert text in found


def generator_step(loss_fn):
    distft.init()
    model, optimizer = DDP().apply(tiny_model("L"), partial(SGD, lr=0.1))
    batches = (batch for batch in tiny_batches([9, 5]))
    return DDP().train_step(model, optimizer, batches, loss_fn=loss_fn).num_loss_tokens


@pytest.mark.parametrize("loss_fn", [None, next_token_loss], ids=["default", "own"])
def test_a_generator_of_batches_is_read_once(pools, loss_fn):
    assert pools(2).run(generator_step, loss_fn) == [28, 28]


def save_groups(strategy, path):
    distft.init()
    model, optimizer = strategy.apply(tiny_model("L"), partial(AdamW, lr=1e-3))
    strategy.train_step(model, optimizer, tiny_batches([9]))
    strategy.save(path, model, optimizer, step=1)


def load_reversed(strategy, path):
    distft.init()
    model = tiny_model("L")
    names = [name for name, _ in model.named_parameters()][::-1]
    model, optimizer = strategy.apply(model, partial(AdamW, lr=1e-3), [{"params": names}])
    before = strategy.gather_weights(model)
    try:
        strategy.load(path, model, optimizer)
    except ValueError as error:
        after = strategy.gather_weights(model)
        return str(error), all(torch.equal(before[name], after[name]) for name in before)
    return "", False


@pytest.mark.parametrize("strategy", ZEROS, ids=str)
def test_zero_refuses_groups_in_another_order_than_saved(pools, tmp_path, strategy):
    path = str(tmp_path / "one")
    pools(2).run(save_groups, strategy, path)
    for text, untouched in pools(2).run(load_reversed, strategy, path):
        assert "in the order of the saved run" in text
        assert untouched


def load_in_precision(strategy, path):
    distft.init()
    model, optimizer = strategy.apply(tiny_model("L"), partial(AdamW, lr=1e-3))
    try:
        strategy.load(path, model, optimizer)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", [ZeRO1, ZeRO3, FSDP2], ids=lambda kind: kind.__name__)
def test_a_load_in_another_precision_is_refused(pools, tmp_path, kind):
    path = str(tmp_path / "one")
    pools(2).run(save_groups, kind(), path)
    for text in pools(2).run(load_in_precision, kind(precision="bf16"), path):
        assert "was saved with precision 'fp32'" in text


def image_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def image_loss(model, batch):
    return model(batch["x"]).float().square().sum()


def float_inputs(strategy):
    distft.init()
    model, optimizer = strategy.apply(image_model(), partial(SGD, lr=0.1))
    batches = head_batches([0], 0)
    return strategy.train_step(model, optimizer, batches, None, image_loss, rows_of).loss


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16"])
@pytest.mark.parametrize("kind", [ZeRO1, ZeRO3, FSDP2], ids=lambda kind: kind.__name__)
def test_inputs_of_floating_numbers_meet_bf16_weights(pools, kind, precision):
    batch = head_batches([0], 0)[0]
    expected = float(image_loss(image_model(), batch).detach()) / 2
    for loss in pools(2).run(float_inputs, kind(precision=precision)):
        assert loss == pytest.approx(expected, rel=3e-2)


def rank_buffers(strategy):
    distft.init()
    model = TwoHeads()
    model.scale.fill_(float(strategy.dp_rank + 2))
    model, _ = strategy.apply(model, partial(SGD, lr=0.1))
    return float(distft.unwrap(model).scale)


@pytest.mark.parametrize(("strategy", "ranks"), SIX, ids=IDS)
def test_buffers_of_rank_0_are_used_everywhere(pools, strategy, ranks):
    assert pools(ranks).run(rank_buffers, strategy) == [2.0] * ranks


class TiedBlocks(nn.Module):
    """Two blocks of a list with one weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.blocks[1].weight = self.blocks[0].weight

    def forward(self, x):
        return self.blocks[1](torch.tanh(self.blocks[0](x)))


def tied_blocks(strategy):
    distft.init()
    model, optimizer = strategy.apply(TiedBlocks(), partial(SGD, lr=0.1))
    batch = {"x": torch.ones(2, 4)}
    return strategy.train_step(model, optimizer, [batch], None, image_loss, rows_of).grad_norm


def test_blocks_that_share_a_weight_are_sharded_with_the_root(pools):
    assert pools(2).run(tied_blocks, FSDP2()) == pytest.approx(pools(2).run(tied_blocks, DDP()))


class WithScalar(nn.Module):
    """One parameter of no dimension."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return x * self.gain


def scalar_parameter(strategy):
    distft.init()
    try:
        strategy.apply(WithScalar(), partial(SGD, lr=0.1))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", [ZeRO1(), ZeRO3(), FSDP2()], ids=str)
def test_a_parameter_of_no_dimension_is_refused_by_name(pools, strategy):
    for text in pools(2).run(scalar_parameter, strategy):
        assert "cannot split 1 parameters of 0 dimensions, such as gain" in text


def hooks_called():
    distft.init()
    model, optimizer = ZeRO2().apply(tiny_model("L"), partial(AdamW, lr=1e-3))
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    ZeRO2().train_step(model, optimizer, tiny_batches([9]))
    return calls


def test_hooks_of_a_zero_optimizer_are_called(pools):
    assert pools(2).run(hooks_called) == [["before", "after"]] * 2


def save_own_class(strategy, path):
    distft.init()
    model, optimizer = strategy.apply(TwoHeads(), partial(SGD, lr=0.1))
    strategy.train_step(model, optimizer, head_batches([0, 1], 0), None, head_loss, rows_of)
    strategy.save(path, model, optimizer, step=1)
    return strategy.gather_weights(model)


@pytest.mark.parametrize("strategy", [ZeRO1(), ZeRO3()], ids=str)
def test_a_zero_checkpoint_of_ones_own_class_is_consolidated(pools, tmp_path, strategy):
    from safetensors.torch import load_file

    weights, *_ = pools(2).run(save_own_class, strategy, str(tmp_path / "one"))
    out = distft.consolidate(tmp_path / "one", tmp_path / "out")
    found = load_file(out / "model.safetensors")
    for name, expected in weights.items():
        assert torch.equal(found[name], expected)


def read_in_two_parts():
    distft.init()
    rows = [{"input_ids": [row, row, row]} for row in range(10)]
    data = DDP().batches((row for row in rows), micro_batch=2)
    seen = []
    for index, window in enumerate(data):
        seen += [int(ids[0]) for batch in window for ids in batch["input_ids"]]
        if index == 1:
            break
    for window in data:
        seen += [int(ids[0]) for batch in window for ids in batch["input_ids"]]
    try:
        list(data)
    except RuntimeError as error:
        return seen, str(error)
    return seen, ""


def test_an_iterator_left_in_the_middle_goes_on_there(pools):
    for seen, text in pools(2).run(read_in_two_parts):
        assert seen == list(range(10))
        assert "read to its end in epoch 0" in text
