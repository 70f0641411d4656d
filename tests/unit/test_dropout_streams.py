"""The stream of a rank between a layer split by columns and one split by rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from distft.training.dropout_streams import split_streams


class Block(nn.Module):
    """Dropout before, between and after two layers."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.before, self.between, self.after = (nn.Dropout(p) for _ in range(3))
        self.up, self.gate, self.down = nn.Identity(), nn.Identity(), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the three masks."""
        first = self.before(x)
        self.up(x)
        self.gate(x)
        second = self.between(x)
        self.down(x)
        return torch.stack([first, second, self.after(x)])


def masks(block: nn.Module, rank: int, seed: int = 0) -> torch.Tensor:
    model = nn.Sequential(block)
    split_streams(model, ["0.up", "0.gate"], ["0.down"], rank, torch.device("cpu"))
    torch.manual_seed(seed)
    return model(torch.ones(64))


def test_ranks_differ_between_the_two_layers_and_nowhere_else():
    first, second = masks(Block(), 0), masks(Block(), 1)
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1], second[1])
    assert torch.equal(first[2], second[2])


def test_the_shared_stream_goes_on_alike():
    after = []
    for rank in (0, 1):
        masks(Block(), rank)
        after.append(torch.rand(4))
    assert torch.equal(*after)


def test_a_module_without_dropout_keeps_its_forward_pass():
    block = Block(p=0.0)
    assert split_streams(nn.Sequential(block), ["0.up"], ["0.down"], 1, torch.device("cpu")) == []
    assert not any(module._forward_hooks for module in block.modules())


def test_evaluation_draws_nothing():
    model = nn.Sequential(Block()).eval()
    split_streams(model, ["0.up"], ["0.down"], 1, torch.device("cpu"))
    state = torch.get_rng_state()
    model(torch.ones(64))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_block_that_is_run_again_draws_the_same_masks():
    model = nn.Sequential(Block())
    split_streams(model, ["0.up", "0.gate"], ["0.down"], 1, torch.device("cpu"))
    seen = []
    model[0].between.register_forward_hook(lambda *call: seen.append(call[2].detach().clone()))
    x = torch.ones(64, requires_grad=True)
    checkpoint(model, x, use_reentrant=False).sum().backward()
    assert len(seen) == 2
    assert torch.equal(*seen)


def test_a_forward_pass_that_raises_leaves_the_shared_stream_as_it_was():
    class Failing(nn.Identity):
        def forward(self, _x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no memory")

    block = Block()
    block.between = Failing()
    found = split_streams(nn.Sequential(block), ["0.up"], ["0.down"], 1, torch.device("cpu"))
    states = []
    for _ in range(2):
        torch.manual_seed(0)
        with pytest.raises(RuntimeError, match="no memory"):
            block(torch.ones(4))
        states.append(torch.rand(4))
    assert torch.equal(*states)
    assert found[0]._shared is None
    torch.manual_seed(0)
    torch.nn.functional.dropout(torch.ones(4))
    torch.randint(2**62, ())
    assert torch.equal(torch.rand(4), states[0])


def test_layers_in_different_modules_meet_in_the_one_around_both():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.ModuleDict({"query": nn.Identity()})
            self.output = nn.ModuleDict({"dense": nn.Identity()})
            self.dropout = nn.Dropout(0.5)

    model = nn.Sequential(Outer())
    (stream,) = split_streams(
        model, ["0.attention.query"], ["0.output.dense"], 0, torch.device("cpu")
    )
    assert stream.module is model[0]
