"""The examples in the docstrings of the formulas give what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import distft.formulas
import distft.spec
import distft.topology

MODULES = [
    "distft.spec",
    "distft.testing.simulate",
    *(f"distft.topology.{info.name}" for info in pkgutil.iter_modules(distft.topology.__path__)),
    *(f"distft.formulas.{info.name}" for info in pkgutil.iter_modules(distft.formulas.__path__)),
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_hold(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
