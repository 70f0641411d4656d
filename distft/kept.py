"""Parameters that stay fp32 in bf16 training: which they are, remembered on their modules.

Marks lie on modules, since splitting replaces parameters and adapters change names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from distft.quantized import packed_names

# Set on a module.
_MARK = "_distft_kept"


@dataclass(frozen=True)
class Keep:
    """What of a module stays fp32.

    Args:
        names: Its own parameters by name; None for everything inside it.
        by_class: Whether the model's class says so, whose code then minds the dtypes. Else the
            user kept it, and what enters and leaves it is cast.
        logits: Whether what leaves it stays fp32: logits of experts or of the vocabulary.
    """

    names: frozenset[str] | None = None
    by_class: bool = False
    logits: bool = False


def is_adapter(name: str) -> bool:
    """Return whether a parameter of that name is an adapter's or of ``modules_to_save``.

    Collective: none.
    """
    parts = name.split(".")
    return "modules_to_save" in parts or any(part.startswith("lora_") for part in parts)


def kept_modules(model: Any) -> dict[str, Keep]:
    """Return what stays fp32 in bf16 training, by the path of its module, outermost modules.

    Kept is what transformers' class of the model keeps (``_keep_in_fp32_modules_strict``), and what
    is fp32 where more of the weights come in bf16; of adapters, which PEFT makes fp32, those on
    such a module. Of parameters with several places, those are kept that the class names by each.

    Collective: none.
    """
    marked = {
        path: vars(module)[_MARK] for path, module in model.named_modules() if _MARK in vars(module)
    }
    return marked or _modules_of(model, _by_class(model), _by_user(model))


def mark_kept(model: Any, by_user: Iterable[str] | None = None) -> None:
    """Remember on its modules what of a model stays fp32, before its weights are cast.

    Args:
        model: The model.
        by_user: Names that the user kept, where the dtypes are not in the model; default by them.

    Collective: none.
    """
    if by_user is None:
        kept = kept_modules(model)
    else:
        kept = _modules_of(model, _by_class(model), set(by_user))
    for path, keep in kept.items():
        setattr(model.get_submodule(path), _MARK, keep)
    follow_adapters(model)


def follow_adapters(model: Any) -> None:
    """Let adapters on a module that stays fp32 stay so with it, after they were attached.

    What PEFT puts around a module uses its weights outside its forward pass, so the two are
    gathered and compute as one.

    Collective: none.
    """
    # Innermost wrappers first: one may be around another.
    for _, outer in reversed(list(model.named_modules())):
        for name in ("base_layer", "original_module"):
            keep = vars(outer._modules.get(name) or object).get(_MARK)
            if keep is not None and keep.names is None:
                setattr(outer, _MARK, keep)
    marked: list[str] = []
    for path, module in model.named_modules():
        if any(is_inside(outer, path) for outer in marked):
            vars(module).pop(_MARK, None)
        elif _MARK in vars(module) and vars(module)[_MARK].names is None:
            marked.append(path)


def kept_names(model: Any) -> frozenset[str]:
    """Return the names of the parameters that stay fp32, each place of a shared one.

    Collective: none.
    """
    kept = kept_modules(model)
    if not kept:
        return frozenset()
    places = _places(model).values()
    return frozenset(n for names in places if any(_covers(kept, n) for n in names) for n in names)


def modules_in_fp32(model: Any) -> set[Any]:
    """Return the modules whose own parameters stay fp32.

    Collective: none.
    """
    found = set()
    for path, keep in kept_modules(model).items():
        module = model.get_submodule(path)
        found |= set(module.modules()) if keep.names is None else {module}
    return found


def majority_is_bf16(sizes: Iterable[tuple[str, int]]) -> bool:
    """Return whether more elements are bf16 than fp32, from pairs of dtype and elements.

    Collective: none.
    """
    counts = {"bfloat16": 0, "float32": 0}
    for dtype, numel in sizes:
        if dtype in counts:
            counts[dtype] += numel
    return counts["bfloat16"] > counts["float32"]


def _covers(kept: Mapping[str, Keep], name: str) -> bool:
    path, _, own = name.rpartition(".")
    if path in kept and own in (kept[path].names or (own,)):
        return True
    return any(keep.names is None and is_inside(outer, name) for outer, keep in kept.items())


def is_inside(outer: str, name: str) -> bool:
    """Return whether a module or parameter is inside a module, by their paths.

    Collective: none.
    """
    return not outer or name.startswith(f"{outer}.")


def _places(model: Any) -> dict[int, list[str]]:
    """Return the names of every parameter; one in several places has several."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return found


def _by_class(model: Any) -> set[str]:
    """Return the names that the classes of transformers in a model keep in fp32 beside bf16."""
    found: set[str] = set()
    outer: list[str] = []
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if not hasattr(module, "_get_dtype_plan") or any(map(prefix.startswith, outer)):
            continue
        outer.append(prefix)
        patterns = bf16_plan(module)
        if patterns is None:
            continue
        for name, parameter in module.named_parameters(remove_duplicate=False):
            plain = name.replace(".base_layer.", ".").replace(".original_module.", ".")
            floating = parameter.is_floating_point()
            if floating and not is_adapter(name) and patterns.search(plain):
                found.add(prefix + name)
    return {
        name
        for names in _places(model).values()
        if all(name in found for name in names)
        for name in names
    }


def bf16_plan(model: Any) -> re.Pattern[str] | None:
    """Return what finds the names that a transformers model loaded in bf16 keeps in fp32.

    Collective: none.
    """
    import torch

    plan = model._get_dtype_plan(torch.bfloat16)
    # The rule by which transformers reads these names: `*` for anything, anywhere in a name.
    patterns = [name.replace("*", ".*") for name, dtype in plan.items() if dtype == torch.float32]
    return re.compile("|".join(patterns)) if patterns else None


def _by_user(model: Any) -> set[str]:
    """Return the names of what is fp32 where more of the weights come in bf16."""
    # Packed weights are no numbers, so their dtype says nothing of the others.
    packed = packed_names(model)
    weights = {
        name: parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not is_adapter(name) and name not in packed
    }
    kinds = {name: str(p.dtype).removeprefix("torch.") for name, p in weights.items()}
    if not majority_is_bf16((kinds[name], p.numel()) for name, p in weights.items()):
        return set()
    return {name for name, kind in kinds.items() if kind == "float32"}


def _modules_of(model: Any, by_class: set[str], by_user: set[str]) -> dict[str, Keep]:
    """Return the outermost modules in which all is kept, and the rest by its own module."""
    kept = by_class | by_user
    if not kept:
        return {}
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found: dict[str, Keep] = {}
    for path, module in model.named_modules():
        if any(keep.names is None and is_inside(outer, path) for outer, keep in found.items()):
            continue
        members = [name for name in names if is_inside(path, name)]
        own = {name for name in module._parameters if (f"{path}.{name}" if path else name) in kept}
        if members and kept.issuperset(members):
            found[path] = Keep(None, by_class.issuperset(members), _makes_logits(model, module))
        elif own:
            found[path] = Keep(frozenset(own), by_class=True)
    return found


def _makes_logits(model: Any, module: Any) -> bool:
    """Return whether a module is the head, or has one row of weights for each expert."""
    # Not at the top: converting a checkpoint needs the names above and no formula.
    from distft.formulas.architectures import expert_numbers

    head = getattr(model, "get_output_embeddings", lambda: None)()
    num_experts, _ = expert_numbers(getattr(model, "config", None))
    weight = module._parameters.get("weight")
    rows = weight.shape[0] if weight is not None and weight.dim() == 2 else 0
    return module is getattr(head, "base_layer", head) or 0 < rows == num_experts
