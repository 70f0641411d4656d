"""Which optimizers `apply` takes, and what it says of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import optim

from distft.training.optimizers import ELEMENTWISE, REFUSED, check_factory


def named(name: str, module: str = "somewhere") -> Callable[[Any], optim.Optimizer]:
    """Return a factory of an optimizer whose class has this name and home."""
    made = type(name, (optim.SGD,), {"__module__": module})
    return lambda parameters: made(parameters, lr=0.1)


@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_an_elementwise_optimizer_is_taken(name):
    check_factory(named(name))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_optimizer_is_named_with_its_reason(name):
    with pytest.raises(ValueError, match=f"^{name} {REFUSED[name][:30]}.*Use one of the 10"):
        check_factory(named(name))


@pytest.mark.parametrize("name", ["AdamW8bit", "PagedLion8bit", "AdamW4bit", "AdamWFp8"])
def test_quantized_state_is_refused(name):
    with pytest.raises(ValueError, match=f"^{name} quantizes its state in blocks"):
        check_factory(named(name, "torchao.optim"))


def test_an_optimizer_of_bitsandbytes_is_refused_though_torch_has_one_of_that_name():
    with pytest.raises(ValueError, match=r"^bitsandbytes' AdamW updates raw memory"):
        check_factory(named("AdamW", "bitsandbytes.optim.adamw"))


def test_an_optimizer_that_nobody_has_tried_is_refused():
    with pytest.raises(ValueError, match="Sophia has not been shown to give the same update"):
        check_factory(named("Sophia"))


@pytest.mark.parametrize("real", [optim.ASGD, optim.Rprop, optim.Adafactor, optim.SparseAdam])
def test_what_torch_has_beside_the_list_is_refused_by_name(real):
    with pytest.raises(ValueError, match=f"^{real.__name__} "):
        check_factory(real)


def test_every_optimizer_of_torch_is_on_one_of_the_two_lists():
    names = {
        name
        for name in dir(optim)
        if isinstance(getattr(optim, name), type) and name != "Optimizer"
    }
    assert names <= ELEMENTWISE | set(REFUSED)
    assert not ELEMENTWISE & set(REFUSED)
