"""What each rank runs: both sides in one process, taking turns step by step."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import by_hand
import by_hand_parallel
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import distft

VOCABULARY = 2048
MICRO_STEPS = 2
WARM_UP = 3  # ZeRO-3 records its trace in the first step and fetches ahead from the second on.
LOSS_TOLERANCE = 1e-6

# Those whose degrees are not the default ones.
STRATEGIES = {
    "hsdp": distft.HSDP(dp_replicate=2),
    "nd": distft.NDParallel(dp_shard=2, tp=2),
}


@dataclass(frozen=True)
class Workload:
    """Size of the model and of a rank's micro-batch."""

    hidden: int = 256
    layers: int = 4
    rows: int = 2
    tokens: int = 128

    def model(self, name: str = "") -> nn.Module:
        """Return a model with random weights, the same on every rank, for a strategy.

        Qwen3; for TP Llama, since transformers sums the gradients of Qwen3's head norms again in
        every micro-step; for EP Qwen3-MoE of 8 experts.
        """
        torch.manual_seed(0)
        family = {"tp": "llama", "nd": "llama", "ep": "qwen3_moe"}.get(name, "qwen3")
        experts = {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": self.hidden,
            "experts_implementation": "eager",
        }
        config = AutoConfig.for_model(
            family,
            **(experts if name == "ep" else {}),
            vocab_size=VOCABULARY,
            hidden_size=self.hidden,
            intermediate_size=3 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=self.hidden // 4,
            tie_word_embeddings=False,
        )
        return AutoModelForCausalLM.from_config(config)

    def window(self, step: int, rank: int) -> list[by_hand.Batch]:
        """Return a rank's micro-batches of one step; rows have prompts of unequal length."""
        generator = torch.Generator().manual_seed(1000 * step + rank)
        batches = []
        for _ in range(MICRO_STEPS):
            ids = torch.randint(VOCABULARY, (self.rows, self.tokens), generator=generator)
            prompt = torch.randint(self.tokens // 2, (self.rows, 1), generator=generator)
            labels = ids.masked_fill(torch.arange(self.tokens) < prompt, -100)
            batches.append({"input_ids": ids, "labels": labels})
        return batches


@dataclass(frozen=True)
class Pairs:
    """Seconds of each pair of steps on one rank, and the losses of the warm-up."""

    ours: list[float]
    by_hand: list[float]
    warm_up_losses: list[tuple[float, float]]

    @property
    def loss_difference(self) -> float:
        """Largest relative difference of the two sides' losses during the warm-up."""
        return max(abs(ours - hand) / abs(hand) for ours, hand in self.warm_up_losses)


def run_pairs(name: str, num_pairs: int, workload: Workload) -> Pairs:
    """Return the times of ``num_pairs`` pairs in ABBA order.

    Raises:
        AssertionError: The losses of the warm-up differ, so that the times would say nothing.

    Collective: every rank.
    """
    distft.init(seed=0)
    strategy = STRATEGIES.get(name) or distft.strategy(name)
    ours = _distft_step(strategy, workload.model(name))
    if name in by_hand_parallel.SIZES:
        hand = by_hand_parallel.build(name, workload.model(name))
    else:
        hand = by_hand.build(name, workload.model(name), MICRO_STEPS)
    # Ranks that share a layer work on the same rows.
    rank = strategy.dp_rank

    losses = []
    for step in range(WARM_UP):
        window = workload.window(step, rank)
        losses.append((ours(window), hand(window)))
    result = Pairs([], [], losses)
    assert result.loss_difference <= LOSS_TOLERANCE, (
        f"{name}: losses of distft and by hand differ by {result.loss_difference:.1e} relative, "
        f"more than {LOSS_TOLERANCE:.0e}: {losses}"
    )
    for pair in range(num_pairs):
        window = workload.window(WARM_UP + pair, rank)
        sides = [(ours, result.ours), (hand, result.by_hand)]
        for step_of, seconds in sides if pair % 2 == 0 else reversed(sides):
            seconds.append(_time(step_of, window))
    return result


def _distft_step(strategy: distft.Strategy, model: nn.Module) -> by_hand.Step:
    model, optimizer = strategy.apply(model, partial(torch.optim.AdamW, lr=by_hand.LEARNING_RATE))

    def step(batches: list[by_hand.Batch]) -> float:
        result = strategy.train_step(model, optimizer, batches, max_grad_norm=by_hand.MAX_NORM)
        return result.loss

    return step


def _time(step: by_hand.Step, window: list[by_hand.Batch]) -> float:
    """Return the seconds from when all ranks are ready to when this one is done."""
    dist.barrier()
    start = time.perf_counter()
    step(window)
    return time.perf_counter() - start
