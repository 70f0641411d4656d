"""Packed weights on one process: quantized part by part, held as parameter and buffers."""

from __future__ import annotations

import copy

import bitsandbytes
import pytest
import torch
from bitsandbytes.functional import quantize_4bit

from distft.quantized import (
    pack,
    pack_empty,
    packed_in,
    published_name,
    quantize_into,
    state_of,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False])
def test_a_weight_quantized_part_by_part_is_the_one_quantized_whole(dtype, kind, nested):
    for shape in ((300, 256), (48, 32)):
        layer = bitsandbytes.nn.Linear4bit(
            shape[1], shape[0], bias=False, quant_type=kind, quant_storage=dtype, device="meta"
        )
        pack_empty(layer, dtype, nested)
        sizes = {name: (buffer.shape, buffer.dtype) for name, buffer in layer.named_buffers()}
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        packed = quantize_into(layer, whole)
        expected, state = quantize_4bit(
            whole, compress_statistics=nested, quant_type=kind, quant_storage=dtype
        )
        assert packed.shape == expected.shape == layer.weight.shape
        assert torch.equal(packed.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(layer.absmax, state.absmax)
        assert state_of(layer) == state
        if nested:
            assert torch.equal(layer.nested_absmax, state.state2.absmax)
            assert torch.equal(layer.nested_offset, state.offset)
        after = {name: (buffer.shape, buffer.dtype) for name, buffer in layer.named_buffers()}
        assert after == sizes


def test_packed_tensors_are_found_by_their_names_beside_and_below_the_weight():
    names = ["a.weight", "a.absmax", "a.packing", "a.bias", "b.weight", "norm.weight"]
    assert packed_in(names) == {"a.weight", "a.absmax", "a.packing"}
    published = {published_name(f"a.{own}", "nf4") for own in ("absmax", "packing", "quant_map")}
    assert packed_in({"a.weight", *published}) == {"a.weight", *published}
    assert published_name("a.nested_offset", "nf4") is None


def test_the_product_keeps_no_bytes_for_the_backward_pass_and_equals_that_of_bitsandbytes():
    plain = bitsandbytes.nn.Linear4bit(64, 48, bias=True, quant_type="nf4").to("cpu")
    mine = copy.deepcopy(plain)
    pack(mine)
    x, other = (torch.randn(5, 64, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    for tensor in (x, other):
        tensor.requires_grad_()
    expected, found = plain(x), mine(other)
    assert torch.equal(expected, found)
    gathered = mine.weight.data
    mine.weight.data = torch.empty(0, dtype=gathered.dtype)
    mine.weight.data = gathered.clone()
    gathered.zero_()
    expected.square().sum().backward()
    found.square().sum().backward()
    assert torch.equal(x.grad, other.grad)
