"""Properties of the writer of ZeRO-3's own files: what goes in comes out, bit for bit."""

from __future__ import annotations

import math
import tempfile
import zipfile
import zlib
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from distft.checkpoint.readers import read_map
from distft.checkpoint.shards import LogicalTensor, OptimizerState, ParamGroup, Piece, ShardMap
from distft.checkpoint.stream import Stream
from distft.checkpoint.writers.checksums import join_crc32
from distft.checkpoint.writers.zero3 import LATEST, plan_zero3

KEYS = ("exp_avg", "exp_avg_sq")
SHAPES = st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=8)


def stored(folder: Path, name: str, array: np.ndarray, columns: bool) -> LogicalTensor:
    """Store an array, in two blocks of columns where that is possible."""
    if not columns or array.ndim < 2 or array.shape[1] < 2:
        (folder / name).write_bytes(array.tobytes())
        pieces = [Piece(name, 0, (0,) * array.ndim, array.shape)]
    else:
        half = array.shape[1] // 2
        left, right = array[:, :half], array[:, half:]
        (folder / name).write_bytes(left.tobytes() + right.tobytes())
        rest = (0,) * (array.ndim - 2)
        pieces = [
            Piece(name, 0, (0, 0, *rest), left.shape),
            Piece(name, left.size * 4, (0, half, *rest), right.shape),
        ]
    return LogicalTensor(name, array.shape, str(array.dtype), pieces)


@given(
    shapes=SHAPES,
    world_size=st.integers(1, 5),
    num_groups=st.integers(1, 3),
    sub_group_size=st.integers(1, 200),
    frozen=st.integers(0, 3),
    bf16=st.booleans(),
    columns=st.booleans(),
)
@settings(max_examples=60)
def test_every_tensor_moment_and_setting_comes_back(
    shapes, world_size, num_groups, sub_group_size, frozen, bf16, columns
):
    chance = np.random.default_rng(0)
    names = [f"layer.{number}.weight" for number in range(len(shapes))]
    trained = names[min(frozen, len(names) - 1) :]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made, "in")
        folder.mkdir()
        arrays = {}

        def new(name, shape):
            arrays[name] = chance.standard_normal(shape, np.float32)
            return stored(folder, name, arrays[name], columns)

        tensors = {name: new(name, shape) for name, shape in zip(names, shapes, strict=True)}
        moments = {n: {k: new(f"{n}.{k}", tensors[n].shape) for k in KEYS} for n in trained}
        counts = np.array([16_777_217])
        (folder / "count").write_bytes(counts.tobytes())
        tensors["count"] = LogicalTensor("count", (1,), "int64", [Piece("count", 0, (0,), (1,))])
        groups = [
            ParamGroup(
                {"lr": 0.1 * (number + 1), "betas": (0.9, 0.99)}, trained[number::num_groups]
            )
            for number in range(num_groups)
        ]
        groups = [group for group in groups if group.names]
        state = OptimizerState("AdamW", moments, dict.fromkeys(trained, 3.0), groups)
        frozen_names = frozenset(names) - frozenset(trained)
        found = ShardMap(
            folder,
            "dcp",
            tensors,
            optimizer=state,
            ties={"tied": names[0]},
            frozen=frozen_names,
            buffers=frozenset({"count"}),
            step=3,
        )
        plan = plan_zero3(found, groups, world_size, "tag", bf16, sub_group_size)
        out = Path(made, "out")
        out.mkdir()
        plan.write(folder, out, 50_000_000)
        (out / LATEST).write_text("tag")
        for file in (out / "tag").iterdir():
            with zipfile.ZipFile(file) as archive:
                assert archive.testzip() is None

        again = read_map(out)
        assert again.check() == []
        assert again.world_size == world_size
        assert again.frozen == frozen_names
        assert again.buffers == {"count"}
        assert again.ties == {"tied": names[0]}
        assert again.optimizer.steps == state.steps
        by_name = {name: group.settings for group in groups for name in group.names}
        assert {
            name: group.settings for group in again.optimizer.groups for name in group.names
        } == by_name
        named = {name: again.tensors[name] for name in names}
        named |= {f"{n}.{k}": again.optimizer.moments[n][k] for n in trained for k in KEYS}
        with Stream(out, 1 << 12) as stream:
            for name, array in arrays.items():
                windows = stream.windows(named[name], "float32")
                data = b"".join(bytes(window) for _, window in windows)
                assert data == array.tobytes(), name
                assert math.prod(named[name].shape) == array.size
            windows = stream.windows(again.tensors["count"], "int64")
            assert b"".join(bytes(window) for _, window in windows) == counts.tobytes()


@given(first=st.binary(max_size=300), second=st.binary(max_size=300))
def test_checksums_of_parts_are_that_of_the_whole(first, second):
    whole = zlib.crc32(first + second)
    assert join_crc32(zlib.crc32(first), zlib.crc32(second), len(second)) == whole
