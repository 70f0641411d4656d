"""Whole tensors of a shard map, put together byte by byte."""

from __future__ import annotations

from pathlib import Path

import torch

from distft.checkpoint.shards import LogicalTensor


def values(root: Path, tensor: LogicalTensor) -> torch.Tensor:
    """Return a tensor put together from its pieces; what no piece covers is -1 in every bit."""
    size = tensor.item_bytes
    whole = bytearray(b"\xff" * tensor.num_bytes)
    for piece in tensor.pieces():
        data = (root / piece.file).read_bytes()
        for first, at, count in piece.runs(tensor.shape):
            begin = piece.offset + at * size
            whole[first * size : (first + count) * size] = data[begin : begin + count * size]
    dtype = getattr(torch, tensor.dtype)
    made = torch.frombuffer(whole, dtype=dtype) if whole else torch.empty(0, dtype=dtype)
    return made.reshape(tensor.shape)
