"""Casting as torch rounds, and what a copy refuses or leaves behind."""

from __future__ import annotations

import tracemalloc
import zlib

import numpy as np
import pytest
import torch

from distft.checkpoint.casts import cast_bytes
from distft.checkpoint.copy import Budget, check_disk, copy_outputs, make_files, whole
from distft.checkpoint.memory import parse_bytes, peak_bytes
from distft.checkpoint.shards import CASTABLE, LogicalTensor, Piece
from distft.checkpoint.stream import Stream


def raw(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()


def bit_patterns(dtype: torch.dtype) -> torch.Tensor:
    """Return every number of 16 bits, or those around rounding steps of a wider dtype."""
    if dtype.itemsize == 2:
        return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    halves = torch.arange(0, 1 << 16, 13, dtype=torch.int32)
    lows = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    wide = ((halves << 16)[:, None] | lows).reshape(-1).view(torch.float32)
    return wide.to(dtype)


@pytest.mark.parametrize("source", CASTABLE)
@pytest.mark.parametrize("target", CASTABLE)
def test_a_cast_rounds_as_torch_does(source, target):
    numbers = bit_patterns(getattr(torch, source))
    expected = numbers.to(getattr(torch, target))
    made = np.empty(expected.nbytes, np.uint8)
    cast_bytes(source, target)(raw(numbers).data, made.data)
    found = torch.from_numpy(made).view(expected.dtype)
    finite = ~expected.isnan()
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.itemsize]
    assert torch.equal(found.view(kind)[finite], expected.view(kind)[finite])
    assert found[~finite].isnan().all()
    assert (~finite).sum() > 100


def test_a_cast_of_integers_or_eight_bit_floats_is_refused_by_name():
    with pytest.raises(ValueError, match=r"float8_e4m3fn cannot be cast to float32"):
        cast_bytes("float8_e4m3fn", "float32")
    with pytest.raises(ValueError, match=r"float32 cannot be cast to int64"):
        cast_bytes("float32", "int64")


@pytest.fixture
def tensor(tmp_path):
    (tmp_path / "source").write_bytes(np.arange(100, dtype=np.float32).tobytes())
    return LogicalTensor("w", (10, 10), "float32", [Piece("source", 0, (0, 0), (10, 10))])


def test_checksums_are_those_of_the_bytes_that_were_written(tensor, tmp_path):
    make_files(tmp_path, {"out": 600}, {})
    outputs = [whole("out", 0, tensor), whole("out", 400, tensor, "bfloat16")]
    sums = copy_outputs(tmp_path, tmp_path, outputs, Budget(2, 64), checksums=True)
    written = (tmp_path / "out").read_bytes()
    assert sums == [zlib.crc32(written[:400]), zlib.crc32(written[400:])]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_source_that_ends_early_is_named(tensor, tmp_path, threads):
    (tmp_path / "source").write_bytes(bytes(399))
    make_files(tmp_path, {"out": 400}, {})
    with pytest.raises(RuntimeError, match=r"source ended at byte 399, and 400 were wanted"):
        copy_outputs(tmp_path, tmp_path, [whole("out", 0, tensor)], Budget(threads, 160))


@pytest.mark.parametrize(
    "pieces",
    [
        [Piece("source", 0, (0, 0), (4, 10)), Piece("source", 0, (5, 0), (5, 10))],
        [Piece("source", 0, (0, 0), (10, 4)), Piece("source", 0, (0, 5), (10, 5))],
        [Piece("source", 0, (0,), (40,), flat=True)],
    ],
    ids=["rows", "columns", "flat"],
)
def test_a_gap_is_named_and_never_filled_with_what_the_buffer_held(tensor, tmp_path, pieces):
    gapped = LogicalTensor("w", (10, 10), "float32", pieces)
    with (
        Stream(tmp_path, 80) as stream,
        pytest.raises(ValueError, match=r"w \(10, 10\) has no piece at its element \d+ of 100"),
    ):
        list(stream.windows(gapped, "float32"))


def test_a_budget_is_kept_by_fewer_threads_and_smaller_buffers_or_refused():
    roomy, tight = Budget.within(10**9), Budget.within(2_000_000)
    assert roomy.buffer_bytes == 2 << 20
    assert tight.threads == 1
    assert (1 << 20) + 3 * tight.buffer_bytes <= 2_000_000
    with pytest.raises(ValueError, match=r"max_ram is 1000 bytes, and 1247184 are needed: 2000 "):
        Budget.within(1000, held=2000)


def test_a_disk_that_is_too_small_is_refused_before_the_first_byte(tmp_path):
    with pytest.raises(ValueError, match=r"needs 1000000000000000 bytes, and its disk has \d+"):
        check_disk(tmp_path / "new" / "model", 10**15)
    assert not (tmp_path / "new").exists()


def test_room_for_a_large_file_is_reserved_and_a_disk_without_it_says_so_at_once(tmp_path):
    make_files(tmp_path, {"large": 20_000_000}, {"large": b"head"})
    found = (tmp_path / "large").stat()
    assert found.st_size == 20_000_000
    # Of a file that only has its size, one block would be there.
    assert found.st_blocks * 512 >= 20_000_000
    with pytest.raises(OSError, match=r"No space left|File too large"):
        make_files(tmp_path, {"huge": 1 << 50}, {})


def test_a_tensor_of_64_mb_is_copied_in_a_few(tmp_path):
    size = 64 << 20
    make_files(tmp_path, {"source": size, "out": size}, {"source": b"begin"})
    tensor = LogicalTensor("w", (size,), "uint8", [Piece("source", 0, (0,), (size,))])
    # numpy tells tracemalloc of its buffers.
    tracemalloc.start()
    try:
        copy_outputs(tmp_path, tmp_path, [whole("out", 0, tensor)], Budget.within(16_000_000))
        assert tracemalloc.get_traced_memory()[1] < 16_000_000
    finally:
        tracemalloc.stop()
    assert peak_bytes() > 16_000_000
    with (tmp_path / "out").open("rb") as file:
        assert file.read(5) == b"begin"


@pytest.mark.parametrize("size", ["", "GB", "0", "-1GB", True, "5 PB"])
def test_a_size_that_is_none_is_refused(size):
    with pytest.raises(ValueError, match=r"max_ram=.* is no size of at least 1 byte"):
        parse_bytes("max_ram", size)
