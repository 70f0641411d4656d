"""What the ranks do in the tests of LoRA; module-level, so that ranks find it by name."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import distft
from distft.peft import attach_adapters, base_model
from distft.testing import tiny_batches, tiny_model
from distft.testing.runs import Training

PROBE = [[5, 17, 130, 0, 42, 8, 99, 3]]
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def lora_config(**changes: Any) -> Any:
    """Return a config of rank 2 on the query projections, where nothing else is said."""
    from peft import LoraConfig

    return LoraConfig(**{"r": 2, "lora_alpha": 7, "target_modules": ["q_proj"], **changes})


def fix_values(model: Any) -> Any:
    """Give every factor a value of its own that is not zero: B = 0 would prove nothing."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                seed = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)
                generator = torch.Generator().manual_seed(seed)
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@dataclass(frozen=True)
class LoraTraining(Training):
    """A training of adapters that start from fixed values, attached before `apply`."""

    lora: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> Any:
        """Return the PEFT model at its start."""
        return fix_values(attach_adapters(super().build(), lora_config(**self.lora), seed=5))


@dataclass(frozen=True)
class LoraRun:
    """A LoRA run; `frozen` is part of the names of adapters that rest, `rows` the vocabulary."""

    lora: Mapping[str, Any] = field(default_factory=dict)
    model: str = "L"
    seed: int = 0
    frozen: str | None = None
    source: str | None = None
    rows: int | None = None

    def build(self) -> Any:
        """Return the base at its start."""
        model = tiny_model(self.model, seed=self.seed)
        if self.source:
            model.name_or_path = model.config._name_or_path = self.source
        if self.rows:
            model.resize_token_embeddings(self.rows, mean_resizing=False)
        return model

    def apply(self, strategy: Any) -> tuple[Any, Any]:
        """Return what `apply` makes of it."""
        import torch

        distft.init(seed=3)
        factory = partial(torch.optim.AdamW, lr=1e-2)
        if self.frozen is None:
            return strategy.apply(self.build(), factory, peft_config=lora_config(**self.lora))
        model = attach_adapters(self.build(), lora_config(**self.lora), seed=3)
        for name, parameter in model.named_parameters():
            if self.frozen in name:
                parameter.requires_grad_(False)
        return strategy.apply(model, factory)

    def step(self, strategy: Any, model: Any, optimizer: Any, step: int) -> float:
        """Make one step and return its loss."""
        batches = tiny_batches([3 + (5 * row) % 12 for row in range(6)], seed=100 + step)
        mine = batches[strategy.dp_rank :: strategy.dp_size]
        return strategy.train_step(model, optimizer, mine, max_grad_norm=1.0).loss


def initial_values(strategy: Any, lora: Mapping[str, Any]) -> dict[str, Any]:
    """Return all weights after `apply`, ranks having drawn other numbers before it."""
    import torch

    distft.init(seed=3)
    model = tiny_model("L")
    torch.rand(1 + strategy.dp_rank)
    factory = partial(torch.optim.AdamW, lr=1e-3)
    wrapped, _ = strategy.apply(model, factory, peft_config=lora_config(**lora))
    return strategy.gather_weights(wrapped)


def logits_of(model: Any) -> Any:
    """Return the logits of the probe."""
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor(PROBE)).logits.float()


def train_and_save(strategy: Any, run: LoraRun, path: Path, steps: int) -> dict[str, Any]:
    """Train some steps, save, and return what the run held then, and the next two losses."""
    model, optimizer = run.apply(strategy)
    for step in range(steps):
        run.step(strategy, model, optimizer, step)
    strategy.save(path, model, optimizer, step=steps)
    held = {
        "weights": strategy.gather_weights(model),
        "logits": logits_of(model),
        "class": type(distft.unwrap(model)).__mro__[0].__name__,
        "trained": [n for n, p in distft.unwrap(model).named_parameters() if p.requires_grad],
        "optimized": [name for group in optimizer.param_groups for name in group["param_names"]],
    }
    held["losses"] = [run.step(strategy, model, optimizer, steps + more) for more in range(2)]
    held["last"] = strategy.gather_weights(model)
    return held


def load_and_step(strategy: Any, run: LoraRun, path: Path, out: Path | None = None) -> Any:
    """Load, save again to `out` where given, and make two more steps."""
    model, optimizer = run.apply(strategy)
    state = strategy.load(path, model, optimizer)
    if out is not None:
        strategy.save(out, model, optimizer, step=state.step)
    losses = [run.step(strategy, model, optimizer, state.step + more) for more in range(2)]
    return {"losses": losses, "last": strategy.gather_weights(model)}


def save_without_network(strategy: Any, run: LoraRun, path: Path) -> list[Any]:
    """Save while every connection is refused; return the addresses that were tried."""
    tried: list[Any] = []
    original, lookup = socket.socket.connect, socket.getaddrinfo

    def refuse(_socket: Any, address: Any, *_: Any) -> None:
        tried.append(address)
        raise OSError("no network in this test")

    model, optimizer = run.apply(strategy)
    run.step(strategy, model, optimizer, 0)
    try:
        socket.socket.connect = refuse  # type: ignore[method-assign]
        socket.getaddrinfo = partial(refuse, None)  # type: ignore[assignment]
        strategy.save(path, model, optimizer, step=1)
    finally:
        socket.socket.connect, socket.getaddrinfo = original, lookup
    return tried


def attach_late(strategy: Any, how: str, path: Path) -> list[str]:
    """Attach adapters to a model that is sharded already, and return what each call says."""
    import torch
    from peft import inject_adapter_in_model

    distft.init()
    factory = partial(torch.optim.AdamW, lr=1e-3)
    model, optimizer = strategy.apply(tiny_model("L"), factory)
    if how == "around":
        model = attach_adapters(model, lora_config(), seed=0)
    else:
        inject_adapter_in_model(lora_config(), distft.unwrap(model))
    calls = (
        lambda: strategy.train_step(model, optimizer, tiny_batches([5])),
        lambda: strategy.save(path, model, optimizer, step=0),
    )
    said = []
    for call in calls:
        try:
            call()
        except RuntimeError as error:
            said.append(str(error))
    return said


def resize_late(strategy: Any) -> str:
    """Resize the vocabulary of a model that is sharded already, and return what is said."""
    model, _ = LoraRun().apply(strategy)
    try:
        base_model(distft.unwrap(model)).resize_token_embeddings(137)
    except RuntimeError as error:
        return str(error)
    return ""


def load_other(strategy: Any, run: LoraRun, path: Path) -> str:
    """Load a checkpoint of another run, and return what is said."""
    model, optimizer = run.apply(strategy)
    try:
        strategy.load(path, model, optimizer)
    except ValueError as error:
        return str(error)
    return ""


def measure(strategy: Any, name: str, lora: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's bytes of state, and its collectives of one step of three micro-steps."""
    import torch

    from distft.measure import count_collectives, model_state_bytes
    from distft.spec import ModelSpec

    distft.init()
    peft_model = attach_adapters(tiny_model(name), lora_config(**lora), seed=0)
    spec = ModelSpec.from_model(peft_model)
    model, optimizer = strategy.apply(peft_model, partial(torch.optim.AdamW, lr=1e-3))

    def step(grad_accum: int) -> None:
        batches = tiny_batches([9, 12, 7][:grad_accum], seed=strategy.dp_rank)
        strategy.train_step(model, optimizer, batches, max_grad_norm=0.1)

    # Until its third micro-step ZeRO-3 has no record to look ahead along.
    for _ in range(2):
        step(1)
    with count_collectives() as counted:
        step(3)
    wire_bytes = counted.wire_bytes
    records = [(record.op, record.num_bytes, record.group_size) for record in counted.records]
    optimizer.zero_grad()
    strategy.backward(model(**tiny_batches([9])[0]).loss)
    state = model_state_bytes(model, optimizer)
    return {"spec": spec, "state": state, "records": records, "wire_bytes": wire_bytes}
