"""One streaming copy: from pieces of logical tensors to ranges of new files, in bounded memory."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from distft.checkpoint.shards import ITEM_BYTES, LogicalTensor
from distft.checkpoint.stream import NUM_BUFFERS, OpenFiles, Stream

# A file system moves 2 MiB at a time as fast as more, and the buffers stay in the cache.
BUFFER_BYTES = 2 << 20
# Less than this spends its time on calls.
_SMALLEST_BUFFER = 1 << 16
# Beyond two threads a local disk is not faster; a network file system is.
THREADS = max(1, min(4, os.cpu_count() or 1))
# What one thread copies at a time, so that threads end together and files grow in order.
_SEGMENT_BYTES = 64 << 20
# Smaller files grow as they are written.
_RESERVED = 16 << 20
# What the interpreter and temporaries of a cast take beside the buffers, for each thread.
_THREAD_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Output:
    """A range of a new file, and the elements that it is to hold.

    Attributes:
        file: File that exists already, relative to the target folder.
        offset: Byte at which the range begins.
        tensor: Where the elements come from.
        dtype: What they are turned into.
        start: First element of the flattened tensor.
        count: Number of elements.
    """

    file: str
    offset: int
    tensor: LogicalTensor
    dtype: str
    start: int
    count: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the range."""
        return self.count * ITEM_BYTES[self.dtype]


def whole(file: str, offset: int, tensor: LogicalTensor, dtype: str | None = None) -> Output:
    """Return the output of a whole tensor, in its own dtype unless another is said.

    Collective: none.
    """
    return Output(file, offset, tensor, dtype or tensor.dtype, 0, tensor.num_elements)


@dataclass(frozen=True, slots=True)
class Budget:
    """How much memory a copy may add: threads, and the bytes of one of their buffers."""

    threads: int
    buffer_bytes: int

    @classmethod
    def within(cls, max_ram: int, held: int = 0, what: str = "headers") -> Budget:
        """Return the budget that fits.

        Args:
            max_ram: Bytes that may be added.
            held: Bytes that are needed beside the buffers whatever their size.
            what: What those are, for the error.

        Raises:
            ValueError: Not even the smallest fits; the message has the bytes that would.

        Collective: none.
        """
        for threads in range(THREADS, 0, -1):
            room = (max_ram - held) // threads - _THREAD_BYTES
            if room >= NUM_BUFFERS * (BUFFER_BYTES if threads > 1 else _SMALLEST_BUFFER):
                return cls(threads, min(BUFFER_BYTES, room // NUM_BUFFERS) // 16 * 16)
        least = held + _THREAD_BYTES + NUM_BUFFERS * _SMALLEST_BUFFER
        raise ValueError(
            f"max_ram is {max_ram} bytes, and {least} are needed: {held} for {what}, "
            f"{least - held} for the smallest buffers. Allow {least} bytes or more."
        )


def copy_outputs(
    root: Path,
    folder: Path,
    outputs: Sequence[Output],
    budget: Budget,
    advance: Callable[[int], None] = lambda _: None,
    checksums: bool = False,
) -> list[int]:
    """Fill ranges of files, and return the CRC-32 of each in their order where asked for.

    Each file is written once and from its beginning on, several threads a few segments apart.

    Args:
        root: Folder that the pieces' files are relative to.
        folder: Folder that the outputs' files are relative to; they exist, headers written.
        outputs: In the order of the files and of the bytes in them.
        budget: Threads and buffers.
        advance: Called with the number of bytes after each window, from any thread.
        checksums: Whether to compute the CRC-32 of each output, which one thread then copies.

    Raises:
        ValueError: A tensor has a gap or a dtype that cannot be cast.
        RuntimeError: A source file ends too early.
        OSError: A file cannot be read or written, such as on a full disk.

    Collective: none.
    """
    sums = [0] * len(outputs)
    tasks = enumerate(outputs) if checksums else ((0, part) for part in _segments(outputs))
    lock, stopped = threading.Lock(), threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        with Stream(root, budget.buffer_bytes) as stream, OpenFiles(os.O_WRONLY) as files:
            while not stopped.is_set():
                with lock:
                    number, task = next(tasks, (0, None))
                if task is None:
                    return
                target, size = files.descriptor(folder / task.file), ITEM_BYTES[task.dtype]
                windows = stream.windows(task.tensor, task.dtype, task.start, task.count)
                for first, data in windows:
                    write_at(target, data, task.offset + (first - task.start) * size)
                    if checksums:
                        sums[number] = zlib.crc32(data, sums[number])
                    advance(len(data))
                    if stopped.is_set():
                        return

    def work_or_stop() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)
            stopped.set()

    threads = [threading.Thread(target=work_or_stop) for _ in range(budget.threads - 1)]
    for thread in threads:
        thread.start()
    work_or_stop()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return sums


def _segments(outputs: Iterable[Output]) -> Iterator[Output]:
    for output in outputs:
        size = ITEM_BYTES[output.dtype]
        step = _SEGMENT_BYTES // size
        for low in range(0, output.count, step):
            yield Output(
                output.file,
                output.offset + low * size,
                output.tensor,
                output.dtype,
                output.start + low,
                min(step, output.count - low),
            )


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of it to an open file from a byte on.

    Collective: none.
    """
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


def make_files(folder: Path, sizes: Mapping[str, int], headers: Mapping[str, bytes]) -> None:
    """Make new files of a size, with their first bytes.

    Raises:
        OSError: A file is there already, or the disk has no room for one.

    Collective: none.
    """
    for name, size in sizes.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("xb") as opened:
            opened.write(headers.get(name, b""))
            opened.flush()
            if size < _RESERVED or not reserve(opened.fileno(), size):
                opened.truncate(size)


def reserve(descriptor: int, size: int) -> bool:
    """Reserve the room of a file on its disk; return whether the file system can.

    What is written into it takes a quarter less time than into a file that grows, and a disk that
    is full says so here. Not ``os.posix_fallocate``: where the file system cannot, it writes.

    Raises:
        OSError: The disk is full.

    Collective: none.
    """
    import ctypes

    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "fallocate"):
        return False
    wide = ctypes.c_int64
    if library.fallocate(descriptor, 0, wide(0), wide(size)) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
        raise OSError(number, os.strerror(number))
    return False


def check_disk(folder: Path, num_bytes: int) -> None:
    """Refuse a write that does not fit on the disk, before its first byte.

    Args:
        folder: Folder to write to, or one to be made.
        num_bytes: Bytes that will be written.

    Raises:
        ValueError: There is less room.

    Collective: none.
    """
    above = next(parent for parent in (folder, *folder.parents) if parent.exists())
    with suppress(FileNotFoundError):
        free = shutil.disk_usage(above).free
        if free < num_bytes:
            raise ValueError(
                f"{folder} needs {num_bytes} bytes, and its disk has {free} free. "
                "Make room, or write to another disk."
            )
