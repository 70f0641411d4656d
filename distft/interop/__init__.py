"""Strategies as the files of other tools, out and back in: accelerate, DeepSpeed, transformers.

A `Recipe` is a strategy as plain values: `distft.strategy(recipe.name, **recipe.fields)` makes it.
"""

from distft.interop.files import read, write
from distft.interop.recipe import Recipe

__all__ = ["Recipe", "read", "write"]
