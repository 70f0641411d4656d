"""Loss means, windows, norms and replicas: the GRAD cases."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD, AdamW

import distft
from distft import DDP, FSDP2, HSDP, ZeRO1, ZeRO2, ZeRO3
from distft.measure import count_collectives
from distft.testing import tiny_batches, tiny_model
from distft.testing.runs import Training, differences, step_by_pieces, train_alone, train_under
from distft.training.loss import count_next_tokens, next_token_loss
from tests.matrix import every_pair

SIX = [
    (DDP(), 2),
    (ZeRO1(), 2),
    (ZeRO2(), 2),
    (ZeRO3(), 2),
    (FSDP2(), 2),
    (HSDP(dp_replicate=2), 4),
]
SIX_IDS = [f"{strategy}@{ranks}" for strategy, ranks in SIX]


def apply_tiny(strategy, name="L", optimizer=None, **changes):
    distft.init(seed=0)
    return strategy.apply(tiny_model(name, **changes), optimizer or partial(SGD, lr=1.0))


def accumulate(strategy, model, batches):
    """Add the gradients of this rank's batches, as a loop of one's own does."""
    total = strategy.count_loss_tokens(batches)
    for index, batch in enumerate(batches):
        more = index < len(batches) - 1
        with strategy.no_sync(model) if more else nullcontext():
            strategy.backward(next_token_loss(model, batch) / total)


def reference(name, batches, **changes):
    """Return loss, norm and gradients of one process over micro-batches."""
    model = tiny_model(name, **changes)
    total = sum(count_next_tokens(batch) for batch in batches)
    loss = 0.0
    for batch in batches:
        share = next_token_loss(model, batch) / total
        share.backward()
        loss += share.item()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    norm = torch.stack([g.norm() for g in gradients.values()]).norm().item()
    return loss, norm, gradients


def assert_gradients(found, expected):
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        error = (found[name] - gradient).norm() / gradient.norm()
        assert error <= 1e-5, f"{name}: {error:.1e}"


# ---- GRAD-01: rows of unequal loss tokens ---------------------------------------------------


def one_step(strategy, loss_tokens):
    model, optimizer = apply_tiny(strategy)
    mine = tiny_batches(loss_tokens)[strategy.dp_rank :: strategy.dp_size]
    return step_by_pieces(strategy, model, optimizer, mine, None)


@pytest.mark.parametrize(
    ("strategy", "ranks", "grad_accum", "tokens"),
    every_pair(
        [DDP(), ZeRO1(), ZeRO2(), ZeRO3(), FSDP2(), HSDP()],
        [(2, 2), (4, 1), (2, 1), (4, 2)],
        [[3, 11, 7, 2], [5, 5, 5, 5]],
    ),
    ids=str,
)
def test_the_mean_is_over_all_loss_tokens(pools, strategy, ranks, grad_accum, tokens):
    """GRAD-01: a mean of per-rank means would over-weight the rows with 2 and 3 tokens."""
    if isinstance(strategy, HSDP):
        strategy = HSDP(dp_replicate=2)
    loss_tokens = (tokens * 2)[: ranks * grad_accum]
    expected_loss, _, expected = reference("L", tiny_batches(loss_tokens))
    for loss, _, gradients in pools(ranks).run(one_step, strategy, loss_tokens):
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        assert_gradients(gradients, expected)


# ---- GRAD-02: what is counted ---------------------------------------------------------------


def count_of_full_rows(strategy):
    distft.init()
    ids = torch.arange(20).reshape(4, 5) + strategy.dp_rank
    batch = {
        "input_ids": ids[strategy.dp_rank * 2 :][:2],
        "labels": ids[strategy.dp_rank * 2 :][:2],
    }
    return strategy.count_loss_tokens([batch])


def test_the_first_label_of_a_row_is_not_counted(pools):
    """GRAD-02: 4 rows of 5 valid labels predict 16 tokens, not 20."""
    assert pools(2).run(count_of_full_rows, DDP()) == [16, 16]


def test_a_packed_row_counts_like_the_rows_it_was_packed_from():
    """GRAD-02, packed: the first token of every document is predicted from nothing."""
    labels = torch.arange(10).unsqueeze(0)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1]])
    packed = {"input_ids": labels, "labels": labels, "position_ids": positions}
    assert count_next_tokens(packed) == 4 + 2 + 1


def packed_step(strategy, packed):
    model, optimizer = apply_tiny(strategy)
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(0, 131, (5,), generator=generator) for _ in range(4)]
    mine = rows[strategy.dp_rank * 2 :][:2]
    if packed:
        ids = torch.cat(mine).unsqueeze(0)
        batch = {"position_ids": torch.arange(5).repeat(2).unsqueeze(0)}
    else:
        ids, batch = torch.stack(mine), {}
    result = strategy.train_step(model, optimizer, [{"input_ids": ids, "labels": ids, **batch}])
    return result.loss, result.grad_norm, result.num_loss_tokens


@pytest.mark.parametrize("strategy", [DDP(), FSDP2()], ids=str)
def test_packed_rows_train_like_rows_of_their_own(pools, strategy):
    """GRAD-02: packing changes neither loss nor gradient nor count."""
    (loss, norm, tokens), *_ = pools(2).run(packed_step, strategy, True)
    (expected_loss, expected_norm, expected_tokens), *_ = pools(2).run(packed_step, strategy, False)
    assert tokens == expected_tokens == 16
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert norm == pytest.approx(expected_norm, rel=1e-5)


# ---- GRAD-03: the short last window ---------------------------------------------------------


def ten_rows():
    return [
        {name: value[0] for name, value in batch.items()}
        for batch in tiny_batches([3, 11, 7, 2, 5, 9, 1, 13, 4, 8])
    ]


def train_epoch(strategy):
    model, optimizer = apply_tiny(strategy)
    data = strategy.batches(ten_rows(), micro_batch=1, grad_accum=4, shuffle=False)
    results = []
    for window in data:
        result = strategy.train_step(model, optimizer, window)
        results.append((len(window), result.loss, result.grad_norm))
    return results, strategy.gather_weights(model)


@pytest.mark.parametrize(("strategy", "ranks"), SIX[:5], ids=SIX_IDS[:5])
def test_the_short_last_window_is_divided_by_its_own_tokens(pools, strategy, ranks):
    """GRAD-03: 10 rows on 2 ranks, accumulation 4, are windows of 4 and 1 micro-steps a rank."""
    rows = tiny_batches([3, 11, 7, 2, 5, 9, 1, 13, 4, 8])
    model = tiny_model("L")
    optimizer = SGD(model.parameters(), lr=1.0)
    expected = []
    for window in (rows[:8], rows[8:]):
        optimizer.zero_grad()
        total = sum(count_next_tokens(row) for row in window)
        losses = [next_token_loss(model, row) / total for row in window]
        loss = sum(losses)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        expected.append((loss.item(), norm.item()))
        optimizer.step()
    for results, weights in pools(ranks).run(train_epoch, strategy):
        assert [size for size, _, _ in results] == [4, 1]
        for (_, loss, norm), (loss_ref, norm_ref) in zip(results, expected, strict=True):
            assert loss == pytest.approx(loss_ref, rel=1e-6)
            assert norm == pytest.approx(norm_ref, rel=1e-5)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(weights[name], parameter.detach(), rtol=0, atol=1e-6)


# ---- GRAD-05: the norm ----------------------------------------------------------------------


def clipped_step(strategy, max_norm):
    model, optimizer = apply_tiny(strategy)
    mine = tiny_batches([3, 11, 7, 2])[strategy.dp_rank :: strategy.dp_size]
    accumulate(strategy, model, mine)
    norm = strategy.clip_grad_norm_(model, max_norm)
    after = strategy.gather_gradients(model)
    optimizer.zero_grad()
    return norm, torch.stack([g.norm() for g in after.values()]).norm().item()


@pytest.mark.parametrize("max_norm", [0.1, 1e9])
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [*SIX, (FSDP2(), 4), (ZeRO3(), 4), (HSDP(dp_replicate=1), 2)],
    ids=str,
)
def test_the_norm_is_of_the_whole_gradient_and_a_plain_number(pools, strategy, ranks, max_norm):
    """GRAD-05: a shard's own norm would be low by sqrt(ranks)."""
    _, expected, _ = reference("L", tiny_batches([3, 11, 7, 2]))
    found = pools(ranks).run(clipped_step, strategy, max_norm)
    assert len({norm for norm, _ in found}) == 1, "the same number on every rank"
    for norm, after in found:
        assert type(norm) is float
        assert norm == pytest.approx(expected, rel=1e-5)
        assert after == pytest.approx(min(max_norm, expected), rel=1e-4)


# ---- GRAD-09: replicas ----------------------------------------------------------------------


def replica_shards(strategy, name):
    model, optimizer = apply_tiny(strategy, name, partial(AdamW, lr=1e-3))
    training = Training(name, num_micro_batches=4)
    steps = []
    for step in range(3):
        mine = training.batches(step)[strategy.dp_rank :: strategy.dp_size]
        strategy.train_step(model, optimizer, mine)
        steps.append({n: p.to_local().detach().clone() for n, p in model.named_parameters()})
    return steps


@pytest.mark.parametrize("name", ["L", "M"])
def test_replicas_stay_equal_to_the_bit(pools, name):
    """GRAD-09: shard r of replica 0 is shard r of replica 1 after every step."""
    ranks = pools(4).run(replica_shards, HSDP(dp_replicate=2), name)
    for shard in (0, 1):
        for ours, theirs in zip(ranks[shard], ranks[shard + 2], strict=True):
            for parameter, value in ours.items():
                assert torch.equal(value, theirs[parameter]), parameter
    for record in pools(4).run(
        train_under, HSDP(dp_replicate=2), Training(name, num_micro_batches=4)
    ):
        assert differences(record, train_alone(Training(name, num_micro_batches=4))) == []


# ---- GRAD-11: ranks with different numbers of batches ---------------------------------------


class Stream:
    """Rows of one rank, without a length."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def uneven_streams(strategy):
    rows = [
        {name: value[0] for name, value in batch.items()}
        for batch in tiny_batches([3, 11, 7, 2, 5, 9, 1, 13, 4])
    ]
    model, optimizer = apply_tiny(strategy)
    mine = rows[:5] if strategy.dp_rank == 0 else rows[5:]
    data = strategy.batches(Stream(mine), micro_batch=1)
    return [
        (len(window), result.loss, result.num_loss_tokens)
        for window in data
        for result in [strategy.train_step(model, optimizer, window)]
    ]


@pytest.mark.parametrize("strategy", [DDP(), FSDP2(), ZeRO2(), ZeRO3()], ids=str)
def test_a_rank_that_runs_out_of_batches_is_padded_with_weight_zero(pools, strategy):
    """GRAD-11: rank 0 has 5 batches, rank 1 has 4; both make 5 steps, each row counts once."""
    first, second = pools(2).run(uneven_streams, strategy)
    assert [size for size, _, _ in first] == [1, 1, 1, 1, 1]
    assert [size for size, _, _ in second] == [1, 1, 1, 1, 0]
    assert [step[1:] for step in first] == [step[1:] for step in second]
    assert [tokens for _, _, tokens in first] == [3 + 9, 11 + 1, 7 + 13, 2 + 4, 5]


# ---- GRAD-12: deferred reduction ------------------------------------------------------------


def deferred_step(strategy, name, loss_tokens, changes):
    model, _ = apply_tiny(strategy, name, **changes)
    if name == "M":
        send_first_rows_to_two_experts(model)
    mine = tiny_batches(loss_tokens)[strategy.dp_rank :: strategy.dp_size]
    with count_collectives() as made:
        accumulate(strategy, model, mine)
    gradients = strategy.gather_gradients(model)
    dtypes = {str(g.dtype) for g in gradients.values()}
    return made.count("reduce_scatter"), gradients, dtypes


def send_first_rows_to_two_experts(model):
    """Route every token but those of the last micro-step to experts 0 and 1."""
    calls = {}

    def biased(module, args, output):
        calls[module] = calls.get(module, 0) + 1
        if calls[module] < 3:
            logits, scores, indices = output
            return logits, scores, torch.arange(2).expand_as(indices).clone()
        return output

    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(biased)


@pytest.mark.parametrize(("defer", "windows"), [(True, 1), (False, 3)])
def test_deferral_reduces_once_a_window_and_keeps_the_gradient(pools, defer, windows):
    """GRAD-12: bf16 weights, fp32 reduction, accumulation 3: 3 units times 1 window, not 3."""
    strategy = FSDP2(precision="bf16-mixed", defer_reduce=defer)
    tokens = [3, 11, 7, 2, 5, 9]
    _, _, expected = reference("L", tiny_batches(tokens))
    for count, gradients, dtypes in pools(2).run(deferred_step, strategy, "L", tokens, {}):
        assert count == 3 * windows
        assert dtypes == {"torch.float32"}
        for name, gradient in expected.items():
            # bf16 compute: 2 percent of a tensor's norm is rounding.
            assert (gradients[name] - gradient).norm() <= 2e-2 * gradient.norm() + 1e-6, name


@pytest.mark.parametrize("defer", [True, False])
def test_an_expert_first_used_on_the_last_micro_step_reduces_in_one_dtype(pools, defer):
    """GRAD-12: such a gradient mixed bf16 and fp32 and failed an assertion."""
    strategy = FSDP2(precision="bf16-mixed", defer_reduce=defer)
    for count, _, dtypes in pools(2).run(deferred_step, strategy, "M", [3, 11, 7, 2, 5, 9], {}):
        assert count == (3 if defer else 9)
        assert dtypes == {"torch.float32"}


# ---- router auxiliary loss ------------------------------------------------------------------


def router_step(strategy, grad_accum):
    model, optimizer = apply_tiny(
        strategy, "M", output_router_logits=True, router_aux_loss_coef=5.0, num_experts_per_tok=1
    )
    row = tiny_batches([9])[0]
    before = strategy.gather_weights(model)
    result = strategy.train_step(model, optimizer, [dict(row)] * grad_accum)
    after = strategy.gather_weights(model)
    gates = {name: before[name] - after[name] for name in before if name.endswith("gate.weight")}
    return result, gates


@pytest.mark.parametrize("grad_accum", [1, 2])
@pytest.mark.parametrize("strategy", [DDP(), ZeRO2(), ZeRO3(), FSDP2()], ids=str)
def test_the_router_loss_does_not_grow_with_ranks_or_accumulation(pools, strategy, grad_accum):
    """The same row everywhere gives the same router update at every split of it."""
    (alone, expected), *_ = pools(1).run(router_step, DDP(), 1)
    for result, gates in pools(2).run(router_step, strategy, grad_accum):
        assert result.aux_loss == pytest.approx(alone.aux_loss, rel=1e-6)
        assert result.loss == pytest.approx(alone.loss, rel=1e-6)
        assert result.aux_loss > 0
        for name, update in gates.items():
            assert (update - expected[name]).norm() <= 1e-4 * expected[name].norm(), name


# ---- non-finite gradients -------------------------------------------------------------------


def poisoned_step(strategy):
    model, optimizer = apply_tiny(strategy, optimizer=partial(AdamW, lr=1e-3))
    batch = tiny_batches([9])[0]

    def infinite(model, batch):
        return next_token_loss(model, batch) * float("inf")

    before = strategy.gather_weights(model)
    bad = strategy.train_step(model, optimizer, [batch], 1.0, infinite, count_next_tokens)
    between = strategy.gather_weights(model)
    good = strategy.train_step(model, optimizer, [batch], 1.0)
    same = all(torch.equal(before[name], between[name]) for name in before)
    return bad.skipped, same, good.skipped, good.loss


@pytest.mark.parametrize(("strategy", "ranks"), SIX, ids=SIX_IDS)
def test_an_update_that_is_not_finite_is_left_out_and_forgotten(pools, strategy, ranks):
    expected, _, _ = reference("L", tiny_batches([9]))
    for skipped, same, skipped_next, loss in pools(ranks).run(poisoned_step, strategy):
        assert (skipped, same, skipped_next) == (True, True, False)
        assert loss == pytest.approx(expected, rel=1e-6)


def step_after_a_dropped_window(strategy):
    model, optimizer = apply_tiny(strategy)
    first, second = tiny_batches([9, 5])
    accumulate(strategy, model, [first])
    optimizer.zero_grad()
    accumulate(strategy, model, [second])
    gradients = strategy.gather_gradients(model)
    optimizer.zero_grad()
    return gradients


@pytest.mark.parametrize(("strategy", "ranks"), SIX, ids=SIX_IDS)
def test_zero_grad_forgets_what_was_accumulated(pools, strategy, ranks):
    _, _, expected = reference("L", tiny_batches([9, 5])[1:])
    for gradients in pools(ranks).run(step_after_a_dropped_window, strategy):
        assert_gradients(gradients, expected)


# ---- precision ------------------------------------------------------------------------------


def reduced_precision(strategy, grad_accum):
    model, optimizer = apply_tiny(strategy, "Q", partial(AdamW, lr=1e-3))
    training = Training("Q", num_micro_batches=2 * grad_accum)
    steps = []
    for step in range(3):
        mine = training.batches(step)[strategy.dp_rank :: strategy.dp_size]
        result = strategy.train_step(model, optimizer, mine)
        steps.append((result.loss, result.grad_norm))
    buffers = {str(b.dtype) for _, b in distft.unwrap(model).named_buffers()}
    return steps, buffers


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16"])
@pytest.mark.parametrize("strategy", [DDP(), ZeRO1(), ZeRO2(), ZeRO3(), FSDP2()], ids=str)
def test_bf16_stays_near_fp32_and_leaves_rotary_frequencies_alone(pools, strategy, precision):
    expected = train_alone(Training("Q", num_micro_batches=6))
    strategy = dataclasses.replace(strategy, precision=precision)
    for steps, buffers in pools(2).run(reduced_precision, strategy, 3):
        assert buffers == {"torch.float32"}
        for (loss, norm), loss_ref, norm_ref in zip(
            steps, expected.losses, expected.norms, strict=True
        ):
            assert loss == pytest.approx(loss_ref, rel=5e-3)
            assert norm == pytest.approx(norm_ref, rel=2e-2)


@pytest.mark.parametrize(("strategy", "ranks"), SIX, ids=SIX_IDS)
def test_activation_checkpointing_changes_nothing(pools, strategy, ranks):
    strategy = dataclasses.replace(strategy, activation_checkpointing=True)
    training = Training("Q", num_micro_batches=ranks * 2)
    for record in pools(ranks).run(train_under, strategy, training):
        assert differences(record, train_alone(training)) == []


def dropout_losses(strategy):
    model, optimizer = apply_tiny(strategy, attention_dropout=0.5)
    batch = tiny_batches([9])[0]
    torch.manual_seed(5)
    result = strategy.train_step(model, optimizer, [batch])
    dist.barrier()
    return result.loss, result.grad_norm


@pytest.mark.parametrize("strategy", [DDP(), FSDP2(), ZeRO3()], ids=str)
def test_recomputation_draws_the_same_dropout_masks(pools, strategy):
    checkpointed = dataclasses.replace(strategy, activation_checkpointing=True)
    plain = pools(2).run(dropout_losses, strategy)
    again = pools(2).run(dropout_losses, checkpointed)
    for (loss, norm), (loss_ref, norm_ref) in zip(again, plain, strict=True):
        assert loss == pytest.approx(loss_ref, rel=1e-6)
        assert norm == pytest.approx(norm_ref, rel=1e-5)


# ---- other losses ---------------------------------------------------------------------------


def summed_error(model, batch):
    """Half the squared error of the logits against one-hot targets: a sum over rows."""
    logits = model(input_ids=batch["input_ids"]).logits[:, -1]
    targets = torch.nn.functional.one_hot(batch["labels"][:, -1], logits.shape[-1])
    return 0.5 * (logits - targets).square().sum()


def count_rows(batch):
    return len(batch["labels"])


def regression_step(strategy):
    model, optimizer = apply_tiny(strategy)
    mine = tiny_batches([3, 11, 7, 2])[strategy.dp_rank :: strategy.dp_size]
    result = strategy.train_step(model, optimizer, mine, None, summed_error, count_rows)
    return result.loss, result.grad_norm


@pytest.mark.parametrize(("strategy", "ranks"), SIX, ids=SIX_IDS)
def test_a_loss_and_a_count_of_ones_own_train_like_one_process(pools, strategy, ranks):
    model = tiny_model("L")
    loss = sum(summed_error(model, batch) for batch in tiny_batches([3, 11, 7, 2])) / 4
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    for found_loss, found_norm in pools(ranks).run(regression_step, strategy):
        assert found_loss == pytest.approx(loss.item(), rel=1e-6)
        assert found_norm == pytest.approx(norm.item(), rel=1e-5)


# ---- a forward pass without a backward pass ------------------------------------------------


def look_then_train(strategy, look):
    model, optimizer = apply_tiny(strategy, optimizer=partial(AdamW, lr=1e-3))
    losses = []
    for step in range(2):
        if look:
            with torch.no_grad():
                next_token_loss(model, tiny_batches([9])[0])
        whole = strategy.gather_weights(model)
        losses.append(strategy.train_step(model, optimizer, tiny_batches([5], seed=step)).loss)
    return losses, float(whole["lm_head.weight"].norm())


@pytest.mark.parametrize(("strategy", "ranks"), SIX, ids=SIX_IDS)
def test_a_look_at_the_loss_between_steps_changes_nothing(pools, strategy, ranks):
    plain = pools(ranks).run(look_then_train, strategy, False)
    assert pools(ranks).run(look_then_train, strategy, True) == plain
