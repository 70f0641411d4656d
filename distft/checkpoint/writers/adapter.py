"""Adapters in PEFT's layout: what ``PeftModel.from_pretrained`` reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from distft.checkpoint.adapters import Adapter
from distft.checkpoint.layouts import AS_IT_IS
from distft.checkpoint.publish import publish
from distft.checkpoint.writers.safetensors import plan_files
from distft.peft import CONFIG_FILE, WEIGHTS_FILE

# PEFT has no index of an adapter's files: there is one, whatever its size.
_ANY_SIZE = 1 << 62


def write_adapter(
    adapter: Adapter,
    folder: Path,
    dtype: str | None,
    max_ram: int,
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Write ``adapter_model.safetensors`` and ``adapter_config.json`` into a folder.

    Args:
        adapter: The adapter.
        folder: A folder without these files, made where there is none.
        dtype: Dtype of its floating tensors, or None to leave each its own.
        max_ram: Bytes of memory that may be added.
        advance: Called with the number of bytes after each window.

    Raises:
        ValueError: A tensor is empty, or memory or disk are too small.

    Collective: none.
    """
    folder.mkdir(exist_ok=True)
    published = publish(adapter.tensors, AS_IT_IS, dtype)
    plan_files(published, _ANY_SIZE, WEIGHTS_FILE).write(adapter.root, folder, max_ram, advance)
    # What is loaded is not trained unless it is asked for.
    config = {**adapter.config, "inference_mode": True}
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
