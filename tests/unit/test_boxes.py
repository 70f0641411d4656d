"""What reading a part of a tensor takes."""

from __future__ import annotations

from pathlib import Path

import torch

from distft.checkpoint.copy import BUFFER_BYTES
from distft.checkpoint.mapped_run import saved_tensor
from distft.checkpoint.memory import peak_bytes
from distft.checkpoint.shards import LogicalTensor, Piece
from distft.checkpoint.stream import NUM_BUFFERS, Stream
from tests.reading import counted_reads

MB = 1 << 20


def test_a_part_takes_its_own_memory_and_that_of_the_buffers(tmp_path):
    # A file without blocks on the disk: half a gigabyte of zeros.
    with (tmp_path / "f").open("wb") as file:
        file.truncate(512 * MB)
    whole = 128 * MB
    halves = [Piece("f", 4 * at, (at,), (whole // 2,), flat=True) for at in (0, whole // 2)]
    tensor = LogicalTensor("w", (whole // 4096, 4096), "float32", halves)
    part = torch.ones(whole // 4096, 512)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()
    with Stream(tmp_path, BUFFER_BYTES) as stream, counted_reads() as read:
        saved_tensor(stream, tensor).fill((0, 1024), part)
    assert not part.any()
    assert read.num_bytes == part.nbytes
    # The first call of torch's takes memory of its own.
    assert peak_bytes() - before < NUM_BUFFERS * BUFFER_BYTES + 24 * MB < tensor.num_bytes / 16
