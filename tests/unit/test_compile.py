"""What `compile="block"` uses of torch: this fails first when a name moves."""

from __future__ import annotations

import inspect

import pytest
import torch

from distft.strategies.blocks import is_compiled


def test_torch_has_the_search_for_a_compiler():
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch.utils._triton import has_triton

    assert callable(get_cpp_compiler)
    assert callable(has_triton)


def test_compile_takes_a_limit_of_graphs():
    assert "recompile_limit" in inspect.signature(torch.compile).parameters


# torch's own compiler imports a part of torch that is deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
def test_a_compiled_module_and_a_compiled_forward_are_known():
    plain, by_method, in_place = (torch.nn.Linear(2, 2) for _ in range(3))
    by_method.forward = torch.compile(by_method.forward)
    in_place.compile()
    assert [is_compiled(m) for m in (plain, by_method, in_place)] == [False, True, True]
