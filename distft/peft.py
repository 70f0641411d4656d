"""LoRA: adapters attached before sharding, drawn alike at any mesh, written in PEFT's layout.

The order is PEFT, then sharding, then the optimizer. Adapters attached to a sharded model are
reduced by nobody: every rank would train its own, and the loss would look well.
"""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distft.kept import follow_adapters, is_adapter
from distft.training.wrappers import published_class

if TYPE_CHECKING:
    from torch import Tensor, nn

# The folder of a checkpoint that holds the adapter, and PEFT's names of the files in it.
ADAPTER = "adapter"
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
_EMBEDDINGS = ("embed_tokens", "lm_head")


def is_peft(model: Any) -> bool:
    """Return whether a model is PEFT's, without importing PEFT.

    Collective: none.
    """
    return any(base.__name__ == "PeftModel" for base in type(model).__mro__)


def base_model(model: Any) -> Any:
    """Return the Hugging Face model below the adapters; a model without any as it is.

    Collective: none.
    """
    return model.get_base_model() if is_peft(model) else model


def attach_adapters(
    model: nn.Module,
    peft_config: Any,
    seed: int,
    prepare: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """Return a PEFT model around ``model``, its base frozen and its adapters drawn from ``seed``.

    Values are drawn for each whole tensor by `draw_adapter`, so they are the same however the
    model is spread.

    Args:
        model: A model that is not sharded; its linear layers are replaced in place.
        peft_config: A ``peft.LoraConfig``.
        seed: Seed of the run.
        prepare: Called on the PEFT model before values are drawn, to give every factor the shape
            of the whole where the model's layers are split already.

    Raises:
        ValueError: The config is none of LoRA, the model has adapters already, or the config names
            no layer of the model.

    Collective: none.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    from distft.expert_lora import check_dropout, patterns_of_parameters

    if not isinstance(peft_config, LoraConfig):
        raise ValueError(
            f"peft_config=... takes a peft.LoraConfig, and got a "
            f"{type(peft_config).__name__}. Other adapters have not been shown to be right here."
        )
    check_dropout(peft_config.target_parameters, peft_config.lora_dropout)
    adapters = adapter_names(model)
    if is_peft(model) or adapters:
        raise ValueError(
            f"apply() got a peft_config and a model that has {len(adapters)} adapter tensors "
            "already. Pass the plain model, or leave peft_config out."
        )
    # PEFT writes into the config it gets. What it draws itself (of base weights, for some
    # initial values) must not depend on how far this rank's generator has come.
    with torch.random.fork_rng(devices=[]), _quiet(), patterns_of_parameters(peft_config):
        torch.manual_seed(seed)
        made: nn.Module = get_peft_model(model, copy.deepcopy(peft_config))
    if prepare is not None:
        prepare(made)
    follow_adapters(made)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            drawn = draw_adapter(name, parameter.shape, peft_config.init_lora_weights, seed)
            if drawn is not None:
                parameter.copy_(drawn)
    return made


def draw_adapter(name: str, shape: Iterable[int], init: Any, seed: int) -> Tensor | None:
    """Return the initial value of one whole adapter tensor, fp32 on the host.

    A from a uniform distribution within ``1/sqrt(fan_in)`` and B zero (LoRA, Hu et al. 2021, with
    PEFT's bound), A from a normal one of deviation ``1/r`` for ``"gaussian"``, both uniform for
    False. The generator is seeded by the run's seed and the parameter's name alone.

    Args:
        name: Name of the parameter in the PEFT model.
        shape: Its full shape.
        init: ``LoraConfig.init_lora_weights``.
        seed: Seed of the run.

    Returns:
        None for a parameter whose value PEFT sets: all that are no factors, zeros, and those that
        are computed of base weights.

    Collective: none.
    """
    import torch

    kind = next((part for part in name.split(".") if part.startswith("lora_")), None)
    size = tuple(shape)
    import hashlib

    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    drawn = torch.empty(size)
    if kind == "lora_embedding_B" or (kind == "lora_embedding_A" and init is False):
        return drawn.normal_(generator=generator) if init in (True, False, "gaussian") else None
    if name.endswith(".bias"):
        return None
    if kind == "lora_A" and init == "gaussian":
        return drawn.normal_(std=1 / size[0], generator=generator)
    if (kind == "lora_A" and init is True) or (kind in ("lora_A", "lora_B") and init is False):
        return torch.nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
    return None


def adapter_names(model: nn.Module) -> list[str]:
    """Return the names of the adapter tensors of a model, in parameter order.

    Collective: none.
    """
    return [name for name, _ in model.named_parameters() if is_adapter(name)]


def base_name(name: str) -> str | None:
    """Return the name that a tensor of a PEFT model has without PEFT, None for an adapter's.

    >>> base_name("base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight")
    'model.layers.0.self_attn.q_proj.weight'

    Collective: none.
    """
    if is_adapter(name):
        return None
    parts = name.removeprefix(PREFIX).split(".")
    return ".".join(part for part in parts if part not in ("base_layer", "original_module"))


def source_name(name: str) -> str | None:
    """Return the name, without PEFT, of the tensor or module that one of a PEFT model starts as.

    A module of ``modules_to_save`` starts as a copy; None for factors, which start as drawn.

    >>> source_name("base_model.model.score.modules_to_save.default.weight")
    'score.weight'
    >>> source_name("base_model.model.score.modules_to_save.default")
    'score'

    Collective: none.
    """
    head, saved, tail = name.partition(".modules_to_save.")
    inner = tail.partition(".")[2]
    return base_name(f"{head}.{inner}" if inner else head if saved else name)


def attach_to_skeleton(
    model: nn.Module,
    peft_config: Any,
    dtype: Any,
    seed: int,
    prepare: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """Return a PEFT model around one without values, its factors with theirs, as `attach_adapters`.

    Raises:
        ValueError: As `attach_adapters`, or the factors start from weights that are not read yet.

    Collective: none.
    """
    import torch

    from distft.checkpoint.skeleton import replace_parameters

    _check_starts_without_weights(peft_config)
    made = attach_adapters(model, peft_config, seed, prepare)

    def value(name: str, parameter: Tensor) -> Tensor:
        if base_name(name) is not None:
            # Also one that its class keeps in fp32.
            return parameter
        if source_name(name) is not None:
            return parameter.detach().to(dtype) if parameter.is_floating_point() else parameter
        if not parameter.is_meta:
            return parameter.detach().to(dtype)
        drawn = draw_adapter(name, parameter.shape, peft_config.init_lora_weights, seed)
        return torch.zeros(parameter.shape, dtype=dtype) if drawn is None else drawn.to(dtype)

    replace_parameters(made, value)
    return made


def _check_starts_without_weights(config: Any) -> None:
    init = getattr(config, "init_lora_weights", True)
    for name, value, wrong in (
        ("init_lora_weights", init, init not in (True, False, "gaussian")),
        ("use_dora", True, getattr(config, "use_dora", False)),
        ("trainable_token_indices", "set", bool(getattr(config, "trainable_token_indices", None))),
    ):
        if wrong:
            raise ValueError(
                f"load_model() puts adapters on before it reads weights, and {name}={value!r} "
                "computes 1 or more of their tensors from weights. Pass apply() a model of "
                "from_pretrained with this peft_config."
            )


# ---- saving -------------------------------------------------------------------------------------


def names_to_save(model: Any) -> list[str]:
    """Return the parameters that the adapter files of a PEFT model need.

    Adapters and fully trained modules; where the vocabulary was resized or embeddings have
    adapters, the embeddings too, since the base that the adapter is put on has other ones.

    Collective: none.
    """
    config = model.peft_config[model.active_adapter]
    names = {name for name, p in model.named_parameters() if is_adapter(name) or p.requires_grad}
    names |= set(_resized_embeddings(model, config))
    return [name for name, _ in model.named_parameters() if name in names]


def _resized_embeddings(model: Any, config: Any) -> list[str]:
    """Return the names of the embeddings that an adapter must carry beside its own tensors."""
    if not saves_embeddings(model, config):
        return []
    members = {id(p) for layer in _embedding_layers(model) for p in layer.parameters()}
    # A module of `modules_to_save` is saved as such; what it was before is nobody's.
    return [
        name
        for name, parameter in model.named_parameters()
        if id(parameter) in members and not is_adapter(name) and ".original_module." not in name
    ]


def _embedding_layers(model: Any) -> list[Any]:
    base = base_model(model)
    layers = [base.get_input_embeddings()] if hasattr(base, "get_input_embeddings") else []
    if hasattr(base, "get_output_embeddings"):
        layers.append(base.get_output_embeddings())
    return [layer for layer in layers if layer is not None]


def saves_embeddings(model: Any, config: Any) -> bool:
    """Return whether an adapter must carry the embeddings; nothing is asked of a network.

    PEFT looks the base up on the hub to compare vocabulary sizes. Here the number of rows now is
    compared with that of the base's folder or cached config, or else with what the model was
    built with.

    Collective: none.
    """
    if getattr(config, "trainable_token_indices", None) is not None:
        return False
    targets = config.target_modules or ()
    if not isinstance(targets, str) and any(name in targets for name in _EMBEDDINGS):
        return True
    layers = _embedding_layers(model)
    if not layers:
        return False
    rows = getattr(getattr(base_model(model), "config", None), "vocab_size", None)
    before = _original_rows(base_model(model), config.base_model_name_or_path)
    return rows is not None and before is not None and rows != before


def _original_rows(base: Any, source: str | None) -> int | None:
    """Return the vocabulary size of the base as published, None where nothing says it."""
    file: Any = None
    if source and (Path(source) / "config.json").is_file():
        file = Path(source) / "config.json"
    elif source and not Path(source).exists():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            file = try_to_load_from_cache(source, "config.json")
        except HFValidationError:
            file = None
    if isinstance(file, str | Path):
        values = json.loads(Path(file).read_text())
        published: int | None = values.get("vocab_size")
        return published or values.get("text_config", {}).get("vocab_size")
    # transformers' resize changes the outer model's number and leaves the inner one's.
    inner = getattr(base, getattr(base, "base_model_prefix", ""), None)
    size = getattr(inner, "vocab_size", None)
    return size if isinstance(size, int) else None


def write_adapter(folder: Path, model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Write an adapter as PEFT does: ``adapter_model.safetensors`` and ``adapter_config.json``.

    Args:
        folder: The new folder.
        model: The PEFT model.
        tensors: Whole tensors of `names_to_save`, by name.

    Raises:
        RuntimeError: A tensor is empty.

    Collective: none.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    adapter = model.active_adapter
    config = copy.deepcopy(model.peft_config[adapter])
    state = get_peft_model_state_dict(
        model,
        state_dict=dict(tensors),
        adapter_name=adapter,
        # PEFT would ask the hub.
        save_embedding_layers=False,
    )
    state |= {name: tensors[name] for name in _resized_embeddings(model, config)}
    empty = [name for name, tensor in state.items() if tensor.numel() == 0]
    if empty or not state:
        raise RuntimeError(
            f"{len(empty)} of {len(state)} adapter tensors are empty, such as {empty[:1]}. "
            "They were not gathered: report this with the strategy."
        )
    folder.mkdir()
    # A tied tensor goes into the file under each of its names, as a copy of its own.
    copies = {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}
    save_file(copies, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    config.inference_mode = True
    mapping = None
    if config.task_type is None:
        base = published_class(base_model(model))
        mapping = {"base_model_class": base.__name__, "parent_library": base.__module__}
    config.save_pretrained(str(folder), auto_mapping_dict=mapping)


# ---- loading ------------------------------------------------------------------------------------


def find_adapter(path: str | Path) -> Path:
    """Return the folder of adapter files that a path means: itself, or ``adapter`` inside.

    Raises:
        ValueError: Neither has them.

    Collective: none.
    """
    for folder in (Path(path), Path(path) / ADAPTER):
        if (folder / CONFIG_FILE).is_file() and (folder / WEIGHTS_FILE).is_file():
            return folder
    raise ValueError(
        f"No adapter at {path}: searched it and its folder {ADAPTER} for {CONFIG_FILE} and "
        f"{WEIGHTS_FILE}. Pass a checkpoint of a LoRA run, or a folder that PEFT wrote."
    )


def load_adapter(model: nn.Module, path: str | Path, trainable: bool = True) -> nn.Module:
    """Return a PEFT model: ``model`` with a saved adapter on it, ready for `Strategy.apply`.

    A base with fewer or more rows in its embeddings than the adapter has is resized.

    Args:
        model: The plain base model, not sharded.
        path: A folder that PEFT wrote, or a checkpoint of a LoRA run.
        trainable: Whether the adapter is trained on.

    Raises:
        ValueError: There is no adapter, it belongs to another base (with both shapes), or the
            model has adapters or is sharded.

    Collective: none.
    """
    from torch.distributed.tensor import DTensor

    folder = find_adapter(path)
    if is_peft(model) or any(
        hasattr(p, "ds_id") or isinstance(p, DTensor) for p in model.parameters()
    ):
        what = "has adapters" if is_peft(model) else "is sharded"
        raise ValueError(
            f"load_adapter() got a model that {what} already. Pass the plain base model: the order "
            "is load_adapter(), then apply()."
        )
    from peft import PeftModel
    from safetensors import safe_open

    with safe_open(folder / WEIGHTS_FILE, "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    _resize_vocabulary(model, shapes)
    _check_base(model, shapes, folder)
    with _quiet():
        made: nn.Module = PeftModel.from_pretrained(
            model, str(folder), is_trainable=trainable, torch_device="cpu"
        )
    return made


def _resize_vocabulary(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    layer = _embedding_layers(model)[:1]
    if not layer:
        return
    tensors = {id(parameter) for parameter in layer[0].parameters()}
    for name, parameter in model.named_parameters():
        shape = shapes.get(f"{PREFIX}{name}")
        if id(parameter) in tensors and shape and shape[1:] == tuple(parameter.shape)[1:]:
            if shape[0] != parameter.shape[0]:
                model.resize_token_embeddings(shape[0], mean_resizing=False)
            return


def _check_base(model: Any, shapes: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    """Raise where an adapter does not fit a base, with both shapes."""
    mine = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    wrong = []
    for name, shape in shapes.items():
        path, _, kind = name.removeprefix(PREFIX).partition(".lora_")
        base = mine.get(f"{path}.weight" if kind else path)
        # The column count of A and the row count of B are those of the base's matrix.
        fits = base == shape
        if kind and base is not None and len(base) == 2 and len(shape) == 2:
            flipped = kind.startswith("embedding_")
            side = {"A": 0 if flipped else 1, "B": 1 if flipped else 0}
            letter = kind.removeprefix("embedding_")[0]
            axis = 0 if letter == "B" else 1
            fits = letter not in side or shape[axis] == base[side[letter]]
        elif kind:
            # Convolutions and fused experts are left to PEFT, which compares whole shapes.
            fits = base is not None or "experts" in path
        if not fits:
            wrong.append((name, shape, base))
    if wrong:
        name, shape, base = wrong[0]
        has = "has no such layer" if base is None else f"has {list(base)} there"
        raise ValueError(
            f"The adapter in {folder} is for another base: {len(wrong)} of {len(shapes)} tensors "
            f"do not fit, such as {name} of shape {list(shape)}, where this "
            f"{type(model).__name__} {has}. Load the base that it was trained on."
        )


def merge_adapter(model: nn.Module, folder: Path) -> nn.Module:
    """Return ``model`` with an adapter added into its weights, without any trace of PEFT.

    ``W + scale * B A`` for every adapted matrix, computed by PEFT.

    Collective: none.
    """
    made: Any = load_adapter(model, folder, trainable=False)
    merged: nn.Module = made.merge_and_unload()
    return merged


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # PEFT asks for it by its older name.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
        yield
