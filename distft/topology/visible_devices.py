"""Which GPUs `CUDA_VISIBLE_DEVICES` leaves, by their numbers in `nvidia-smi`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def visible_numbers(
    value: str | Sequence[int] | None,
    gpus: Sequence[int],
    uuids: Mapping[str, int] | None = None,
) -> tuple[int, ...]:
    """Return the numbers of visible GPUs in CUDA's order; nothing where all are visible.

    Args:
        value: A value of `CUDA_VISIBLE_DEVICES`, or numbers; None for no restriction.
        gpus: Numbers of the GPUs there are.
        uuids: Number of each GPU by its UUID, for values that name those (a start is enough).

    Raises:
        ValueError: A GPU is not there, is there twice, or is named in a way that is not known.

    Collective: none.

    >>> visible_numbers("4,5", range(8))
    (4, 5)
    """
    if value is None:
        return ()
    words = value.split(",") if isinstance(value, str) else list(map(str, value))
    found = [_number(word.strip(), gpus, uuids or {}) for word in words if word.strip()]
    if not found:
        raise ValueError(
            "No device is visible, since the list of them is empty. "
            "Name at least one, or leave it unset."
        )
    if len(set(found)) < len(found):
        raise ValueError(
            f"The visible devices are {value!r}, which names a GPU twice. Name each once."
        )
    return tuple(found)


def _number(word: str, gpus: Sequence[int], uuids: Mapping[str, int]) -> int:
    if word.isdecimal() and int(word) in gpus:
        return int(word)
    matches = {gpu for uuid, gpu in uuids.items() if word and uuid.startswith(word)}
    if len(matches) == 1:
        return matches.pop()
    raise ValueError(
        f"The visible devices name {word!r}, but the GPUs are {list(gpus)}. "
        "Name GPUs by these numbers, or by UUID where nvidia-smi is at hand; MIG slices are none."
    )
