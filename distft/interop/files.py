"""Recipes as files by their names: accelerate.yaml, deepspeed.json, launch.sh and two more."""

from __future__ import annotations

import json
import re
from pathlib import Path

from distft.interop.accelerate import from_yaml, to_yaml
from distft.interop.deepspeed_json import load_json, to_deepspeed, to_distributed, to_parallelism
from distft.interop.recipe import Recipe

_KINDS = (
    "accelerate.yaml, deepspeed.json, parallelism_config.json, distributed_config.json, launch.sh"
)
_MARK = "# distft.strategy: "


def write(recipe: Recipe, path: Path) -> Path:
    """Write a recipe for another tool; the name of the file says which.

    Args:
        recipe: The strategy.
        path: A file whose name ends with one of accelerate.yaml (any .yaml), deepspeed.json,
            parallelism_config.json, distributed_config.json, launch.sh (any .sh).

    Raises:
        ValueError: The name says no tool, or the tool has no such strategy.

    Collective: none.
    """
    path.write_text(_text(recipe, path.name), encoding="utf-8")
    return path


def _text(recipe: Recipe, name: str) -> str:
    if name.endswith((".yaml", ".yml")):
        return to_yaml(recipe)
    if name.endswith(".sh"):
        return _launch(recipe)
    for ending, make in (
        ("deepspeed.json", to_deepspeed),
        ("parallelism_config.json", to_parallelism),
        ("distributed_config.json", to_distributed),
    ):
        if name.endswith(ending):
            return json.dumps(make(recipe), indent=2) + "\n"
    raise ValueError(f"{name!r} names none of the files that can be written: {_KINDS}.")


def _launch(recipe: Recipe) -> str:
    each = recipe.num_ranks // recipe.nodes
    marked = {
        "name": recipe.name,
        "fields": dict(recipe.fields),
        "num_ranks": recipe.num_ranks,
        "nodes": recipe.nodes,
        "micro_batch": recipe.micro_batch,
        "grad_accum": recipe.grad_accum,
    }
    shown = ", ".join([f'"{recipe.name}"', *(f"{k}={v!r}" for k, v in recipe.fields.items())])
    wires = ""
    if recipe.nodes > 1:
        wires = ' --node-rank="$NODE_RANK" --master-addr="$MASTER_ADDR" --master-port=29500'
    return (
        "#!/bin/sh\n"
        "# In train.py:\n"
        f"#   strategy = distft.strategy({shown})\n"
        f"#   strategy.batches(dataset, micro_batch={recipe.micro_batch}, "
        f"grad_accum={recipe.grad_accum})\n"
        f"{_MARK}{json.dumps(marked)}\n"
        f'exec torchrun --nnodes={recipe.nodes} --nproc-per-node={each}{wires} train.py "$@"\n'
    )


def read(path: str | Path) -> Recipe:
    """Return the recipe of a file of another tool, or of a launch file of ours.

    Raises:
        ValueError: It is none that can be read.

    Collective: none.
    """
    path = Path(path)
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".yaml", ".yml"):
        return from_yaml(text)
    if path.suffix == ".json":
        return load_json(text)
    found = re.search(rf"^{re.escape(_MARK)}(.+)$", text, re.MULTILINE)
    if found is None:
        raise ValueError(
            f"{path.name} is none of the files that can be read: {_KINDS}. "
            "A launch file has a line that begins with '# distft.strategy:'."
        )
    return Recipe(**json.loads(found[1]))
