"""What ranks send under TP, EP and products of axes equals `traffic` to the byte, axis by axis."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

import distft
from distft import EP, TP, ModelSpec, NDParallel, Workload
from distft.peft import attach_adapters
from distft.testing import tiny_batches, tiny_model
from tests.gloo.lora_jobs import EXPERTS, lora_config

FOUR_KV = {"num_key_value_heads": 4}
ODD = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3}
BIASED = {"attention_bias": True, "mlp_bias": True}
EVEN_ROWS = {"vocab_size": 132}
ROWS, LENGTH = 2, 16


@dataclass(frozen=True)
class Case:
    """A model under a strategy, and what is trained of it."""

    strategy: Any
    ranks: int
    model: str
    changes: dict[str, Any] = field(default_factory=dict)
    grad_accum: int = 1
    lora: dict[str, Any] | None = None
    frozen: str | None = None
    # What comes in fp32 in a model that is bf16 otherwise.
    kept: str | None = None
    # Whether every token goes to expert 0 and to the first of the second half.
    even: bool = False

    def __str__(self) -> str:
        """Name of the test."""
        parts = [f"{self.strategy}@{self.ranks}", self.model, f"{self.grad_accum}x"]
        parts += ["odd"] if self.changes else []
        if self.lora:
            parts.append("adapted " + "+".join(self.lora["target_modules"] or ["experts"]))
        parts += [f"no {self.frozen}"] if self.frozen else []
        parts += [f"fp32 {self.kept}"] if self.kept else []
        return "-".join(parts)

    def build(self) -> Any:
        """Return the model before any strategy."""
        model = tiny_model(self.model, **self.changes)
        if self.kept is not None:
            for name, module in model.bfloat16().named_modules():
                if name.endswith(self.kept):
                    module.float()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self.frozen is None or self.frozen not in name)
        return model

    def predicted(self) -> Any:
        """Return the report."""
        model = self.build()
        if self.lora is not None:
            model = attach_adapters(model, lora_config(**self.lora), seed=0)
        load = Workload(micro_batch=ROWS, seq_len=LENGTH, grad_accum=self.grad_accum)
        return self.strategy.traffic(ModelSpec.from_model(model), load, world_size=self.ranks)


def sent(case: Case) -> Any:
    """Return this rank's payloads of one step, by op and ranks, and its bytes on the wire."""
    import torch

    from distft.measure import count_collectives

    distft.init(seed=0)
    strategy, lora = case.strategy, case.lora
    model = case.build()
    if case.even:
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(choose_evenly)
    model, optimizer = strategy.apply(
        model,
        partial(torch.optim.AdamW, lr=1e-3),
        peft_config=None if lora is None else lora_config(**lora),
    )

    def step(grad_accum: int) -> None:
        rows = tiny_batches([9] * ROWS * grad_accum, length=LENGTH, seed=strategy.dp_rank)
        batches = [
            {name: torch.cat([row[name] for row in rows[i::grad_accum]]) for name in rows[0]}
            for i in range(grad_accum)
        ]
        strategy.train_step(model, optimizer, batches, max_grad_norm=0.1)

    # The first step also compares the rows of each tp group.
    step(1)
    with count_collectives() as made:
        step(case.grad_accum)
    return made.payloads(), made.wire_bytes


def choose_evenly(_module: Any, _args: Any, output: Any) -> Any:
    """Let every token go to two experts of M that lie on different ranks."""
    import torch

    logits, scores, indices = output
    return logits, scores, torch.tensor([0, 3]).expand_as(indices)


def check(pool: Any, case: Case) -> Any:
    """Compare every axis; of what goes to experts, the sum over ranks. Return what was sent."""
    report, mesh = case.predicted(), case.strategy.mesh(case.ranks)
    exchanged = predicted_exchanges = 0
    results = pool.run(sent, case)
    for rank, (found, _) in enumerate(results):
        expected: dict[Any, int] = {}
        for (op, axis), payload in report.payload_by_axis().items():
            key = (op, mesh.group(axis, rank))
            expected[key] = expected.get(key, 0) + payload
        for key in [key for key in expected if key[0] == "all_to_all"]:
            # Which experts a token chooses decides who gets it, not how many are sent in all.
            exchanged += found.pop(key)
            predicted_exchanges += expected.pop(key)
        assert found == expected, f"rank {rank}"
    assert exchanged == predicted_exchanges
    return report, results


CASES = [
    Case(TP(tp=2), 2, "L", BIASED),
    *[Case(TP(tp=2), 2, model) for model in ("Lt", "Q", "M", "X", "G")],
    Case(TP(tp=3), 3, "Lt", {**ODD, **BIASED}, 2),
    Case(TP(tp=4), 4, "M", FOUR_KV),
    *[Case(EP(ep=2), 2, model) for model in ("M", "G")],
    *[Case(EP(ep=3), 3, model) for model in ("M", "X")],
    Case(EP(ep=2), 4, "M", {}, 2),
    *[Case(NDParallel(tp=2), 4, model) for model in ("M", "X")],
    Case(NDParallel(dp_replicate=2, tp=2), 4, "Q", EVEN_ROWS, 2),
    Case(NDParallel(dp_replicate=2, ep=2), 4, "M", {}, 2),
    Case(NDParallel(tp=2, ep=2), 4, "M"),
    Case(NDParallel(tp=2, ep=4), 4, "G"),
    Case(NDParallel(tp=2, ep=2, plan={}), 2, "M"),
]
ND = partial(NDParallel, tp=2, ep=2)
POLICIES = [
    Case(ND(activation_checkpointing=True), 4, "M", {}, 2),
    Case(ND(defer_reduce=True), 4, "M", {}, 3),
    Case(ND(precision="bf16-mixed"), 4, "X", {"num_local_experts": 4}),
    Case(TP(tp=2, activation_checkpointing=True), 2, "L"),
    Case(TP(tp=2, precision="bf16"), 2, "X"),
    Case(EP(ep=2, activation_checkpointing=True), 4, "M"),
    Case(EP(ep=2, reshard_after_forward=False, precision="bf16-mixed"), 4, "G"),
]
KEPT = [
    Case(TP(tp=2, precision="bf16"), 2, "M", kept="mlp.gate"),
    Case(ND(precision="bf16"), 4, "M", kept="mlp.gate"),
    Case(NDParallel(tp=2, precision="bf16-mixed"), 4, "L", kept="lm_head"),
]
DENSE = {"target_modules": ["q_proj", "o_proj", "up_proj", "down_proj"]}
ATTENTION = {"target_modules": ["q_proj", "o_proj"]}
LAST_BLOCK = {**ATTENTION, "layers_to_transform": [1]}
OF_EXPERTS = {"target_modules": [], "target_parameters": list(EXPERTS)}
OF_OUTPUTS = {"target_modules": [], "target_parameters": [EXPERTS[1]]}
TUNED = [
    Case(TP(tp=2), 2, "L", lora=DENSE),
    Case(TP(tp=2, activation_checkpointing=True), 2, "L", lora=DENSE),
    Case(TP(tp=2, activation_checkpointing=True), 2, "L", lora=LAST_BLOCK),
    Case(ND(), 4, "M", lora=ATTENTION),
    Case(ND(), 4, "M", lora=OF_EXPERTS),
    Case(EP(ep=2), 4, "M", lora=OF_EXPERTS),
    Case(TP(tp=2), 2, "M", lora=OF_EXPERTS),
    Case(TP(tp=2, precision="bf16"), 2, "M", lora=OF_OUTPUTS),
    Case(TP(tp=2), 2, "Q", frozen="mlp"),
]
# What each of these shows is shown by another one of fewer ranks, or beside another policy.
MORE = [
    Case(TP(tp=4), 4, "L", FOUR_KV),
    Case(EP(ep=2), 4, "G"),
    *[Case(NDParallel(tp=2), 4, model) for model in ("Lt", "Q")],
    Case(ND(reshard_after_forward=False), 4, "M"),
    Case(ND(precision="bf16-mixed"), 4, "M"),
    Case(NDParallel(dp_replicate=2, tp=2, defer_reduce=True), 4, "L", EVEN_ROWS, 2),
    Case(NDParallel(tp=2), 4, "L", lora={**DENSE, "modules_to_save": ["lm_head"]}),
    Case(ND(), 4, "M", frozen="embed_tokens"),
    Case(NDParallel(tp=2), 4, "G", lora=OF_EXPERTS),
    Case(TP(tp=2, activation_checkpointing=True), 2, "M", lora=OF_EXPERTS),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=str)
def test_so_are_those_of_more_ranks_and_policies(pools, case):
    check(pools(case.ranks), case)


@pytest.mark.parametrize("case", [*CASES, *POLICIES, *KEPT, *TUNED], ids=str)
def test_bytes_sent_on_every_axis_are_those_of_the_formula(pools, case):
    check(pools(case.ranks), case)


@pytest.mark.parametrize("strategy", [EP(ep=2), NDParallel(tp=2, ep=2)], ids=str)
def test_with_even_routing_each_rank_sends_what_the_report_says(pools, strategy):
    report, results = check(pools(4), Case(strategy, 4, "M", even=True))
    assert {wire for _, wire in results} == {report.bytes_per_step}


def test_the_report_is_that_of_the_rank_with_most_rows(pools):
    case = Case(NDParallel(dp_replicate=2, tp=2), 4, "L")
    first, second, *_ = pools(4).run(sent, case)
    assert first[1] == case.predicted().bytes_per_step
    # 131 rows of embedding and head are 66 and 65 over tp, and sums over replicas are not padded:
    # two rows of 32 fp32 numbers, which a ring of two ranks sends once.
    assert first[1] - second[1] == 2 * 32 * 4
