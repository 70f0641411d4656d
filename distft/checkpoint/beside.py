"""What lies beside the weights of a model: tokenizer, generation config and the like."""

from __future__ import annotations

import shutil
from pathlib import Path

from distft.checkpoint.folder import LAYOUTS, MANIFEST, STATE_FILE
from distft.checkpoint.publish import CONFIG
from distft.peft import ADAPTER

_OURS = {MANIFEST, STATE_FILE, CONFIG, "rng", ADAPTER, *LAYOUTS}
# What a model's folder has beside weights; a folder of another tool may hold anything else.
_BESIDE = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "vocab.*", "merges.txt", "*.model", "chat_template.*", "*processor_config.json",
)  # fmt: skip


def copy_beside(root: Path, made: Path) -> None:
    """Copy what a run saved with its weights, but for the config, which says their dtype.

    Collective: none.
    """
    members = (
        root.iterdir()
        if (root / MANIFEST).is_file()
        else (file for pattern in _BESIDE for file in root.glob(pattern) if file.is_file())
    )
    for member in members:
        if member.name in _OURS:
            continue
        if member.is_dir():
            shutil.copytree(member, made / member.name, dirs_exist_ok=True)
        else:
            shutil.copy(member, made)
