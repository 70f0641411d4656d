"""Whole tensors: of a shard map byte by byte, of a folder of torch's by torch itself."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed.checkpoint as dcp

from distft.checkpoint.dcp import read_shapes
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


def read_by_torch(folder: Path, prefix: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a distributed checkpoint whose names begin with a prefix."""
    found = {
        name: torch.empty(shape, dtype=dtype)
        for name, (shape, dtype) in read_shapes(folder).items()
        if name.startswith(prefix)
    }
    with warnings.catch_warnings():
        # One process is what is wanted; torch warns that it is so.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


@dataclass
class Reads:
    """Bytes that this process has read from files at places that it named, as streams do."""

    num_bytes: int = 0


@contextmanager
def counted_reads() -> Iterator[Reads]:
    """Count them while the context lasts, by what the system says of each call."""
    found, read = Reads(), os.preadv

    def counting(*args: int, **how: int) -> int:
        done = read(*args, **how)
        found.num_bytes += done
        return done

    with patch.object(os, "preadv", counting):
        yield found
