"""A user's model made small by its own code: the same classes built from narrower configs."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEAD_DIM = 16
VOCABULARY = 256
WIDTH = 64
EXPERTS = 32
# Above it a model that cannot be narrowed is too large to train four times on a laptop.
MAX_HIDDEN = 1024

_WIDTHS = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "ffn_dim",
    "n_inner",
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Latent attention: each is a rank or a size of a head of its own.
_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
# What names files, machines or dtypes of the model that is not read.
_OF_THE_FILES = (
    "cache_dir", "code_revision", "device_map", "dtype", "force_download", "gguf_file",
    "max_memory", "offload_folder", "revision", "state_dict", "subfolder", "token", "torch_dtype",
    "tp_plan", "tp_size", "variant",
)  # fmt: skip


_IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")


def alike(size: int, limit: int, ranks: int) -> int:
    """Return a size of about ``limit`` that ranks divide, or leave over, as they do ``size``.

    >>> alike(151936, 256, 4), alike(50257, 256, 4), alike(131, 256, 4)
    (256, 257, 131)

    Collective: none.
    """
    small = limit - limit % ranks + size % ranks
    return min(size, small)


@dataclass(frozen=True)
class Shrink:
    """How far a config is cut: fewer layers and a small vocabulary, and narrower where it may be.

    Applied twice it changes nothing more, since configs meet it once for each module built of them.

    Attributes:
        ranks: Sizes that this number divides stay divisible by it, and others stay not.
        widths: Whether heads, hidden and expert sizes are cut too.
        layers: Layers that stay, at most.
    """

    ranks: int
    widths: bool = True
    layers: int = 2

    def __call__(self, config: Any) -> None:
        """Cut a transformers config in place, and those inside it.

        Raises:
            ValueError: It cannot be narrowed, and is too large without.

        Collective: none.
        """
        for name in getattr(config, "sub_configs", None) or ():
            if getattr(config, name, None) is not None:
                self(getattr(config, name))
        self._cut_layers(config)
        self._cut_vocabulary(config)
        hidden = _number(config, "hidden_size")
        if self.widths and hidden is not None and hidden > 2 * WIDTH:
            self._cut_widths(config, hidden)
        elif hidden is not None and hidden > MAX_HIDDEN:
            raise ValueError(
                f"{type(config).__name__} has hidden_size={hidden}, above {MAX_HIDDEN}, and its "
                "widths could not be cut. Pass a build_model that builds a small one, and "
                "shrink=False."
            )

    def _cut_layers(self, config: Any) -> None:
        layers = _number(config, "num_hidden_layers")
        if layers is None or layers <= self.layers:
            return
        config.num_hidden_layers = self.layers
        kinds = getattr(config, "layer_types", None)
        if kinds:
            # One layer of each kind, where the model has several.
            config.layer_types = [*dict.fromkeys(kinds), *kinds][: self.layers]
        dense = _number(config, "first_k_dense_replace")
        if dense:
            config.first_k_dense_replace = min(dense, self.layers - 1)

    def _cut_vocabulary(self, config: Any) -> None:
        size = _number(config, "vocab_size")
        if size is None or size <= VOCABULARY + self.ranks:
            return
        config.vocab_size = alike(size, VOCABULARY, self.ranks)
        for place, name in enumerate(("pad_token_id", "bos_token_id", "eos_token_id")):
            if getattr(config, name, None) is not None:
                setattr(config, name, place)

    def _cut_widths(self, config: Any, hidden: int) -> None:
        heads = _number(config, "num_attention_heads")
        if heads is not None:
            size = _number(config, "head_dim") or hidden // heads
            kv_heads = _number(config, "num_key_value_heads") or heads
            few = alike(kv_heads, 2 * self.ranks if kv_heads == heads else self.ranks, self.ranks)
            few = max(few, 1)
            config.num_attention_heads = few if kv_heads == heads else 2 * few
            if _number(config, "num_key_value_heads") is not None:
                config.num_key_value_heads = few
            if _number(config, "head_dim") is not None:
                config.head_dim = HEAD_DIM
            narrow = config.num_attention_heads * HEAD_DIM
            # Where heads together are wider or narrower than the model they stay so.
            config.hidden_size = narrow * hidden // (heads * size) // 8 * 8 or narrow
        else:
            config.hidden_size = alike(hidden, WIDTH, self.ranks)
        for name in _WIDTHS:
            width = _number(config, name)
            if width is not None:
                setattr(config, name, alike(width, WIDTH, self.ranks))
        for name, limit in _LATENT.items():
            if _number(config, name) is not None:
                setattr(config, name, min(getattr(config, name), limit))
        rotated = _number(config, "qk_rope_head_dim")
        if rotated is not None and _number(config, "head_dim") is not None:
            config.head_dim = rotated
        self._cut_experts(config)

    def _cut_experts(self, config: Any) -> None:
        for name in _EXPERTS:
            experts = _number(config, name)
            chosen = _number(config, "num_experts_per_tok") or 1
            if experts is not None and experts > EXPERTS:
                setattr(config, name, max(alike(experts, EXPERTS, self.ranks), 2 * chosen))


def _number(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


@contextmanager
def smaller_models(shrink: Callable[[Any], None]) -> Iterator[dict[str, Any]]:
    """Build transformers models inside from configs that ``shrink`` has cut; read no weights.

    ``from_pretrained`` draws weights of the cut config. Where they are to be quantized it writes
    them to a folder that is gone afterwards and reads that one with the caller's own arguments.
    What was cut is filled into the mapping that the context gives, from name to old and new value.

    Collective: none.
    """
    from transformers import PreTrainedModel

    changed: dict[str, Any] = {}

    def cut(config: Any) -> None:
        before = _flat(config)
        shrink(config)
        after = _flat(config)
        for name in before:
            if before[name] != after.get(name) and name not in changed:
                changed[name] = (before[name], after.get(name))

    home: Any = PreTrainedModel
    built, loaded = home.__init__, home.__dict__["from_pretrained"]

    def init(self: Any, config: Any, *inputs: Any, **more: Any) -> None:
        cut(config)
        built(self, config, *inputs, **more)

    @classmethod  # type: ignore[misc]
    def from_pretrained(cls: Any, path: Any, *inputs: Any, config: Any = None, **more: Any) -> Any:
        import torch
        from safetensors.torch import save_model

        kept = {name: value for name, value in more.items() if name not in _OF_THE_FILES}
        if hasattr(kept.get("quantization_config"), "bnb_4bit_compute_dtype"):
            kept["quantization_config"] = copy.copy(kept["quantization_config"])
            kept["quantization_config"].bnb_4bit_compute_dtype = torch.float32
        if not hasattr(config, "to_dict"):
            config = cls.config_class.from_pretrained(path if config is None else config)
        cut(config)
        chosen = {name: kept[name] for name in _IMPLEMENTATIONS if name in kept}
        model = cls._from_config(config, dtype=torch.float32, **chosen)
        if kept.get("quantization_config") is None:
            return model
        with tempfile.TemporaryDirectory(prefix="distft-small-") as folder:
            # save_pretrained writes on rank 0 alone, and every rank reads its own.
            config.save_pretrained(folder)
            save_model(model, str(Path(folder, "model.safetensors")), {"format": "pt"})
            kept.update(config=config, dtype=torch.float32)
            return loaded.__func__(cls, folder, *inputs, **kept)

    home.__init__ = init
    home.from_pretrained = from_pretrained
    try:
        yield changed
    finally:
        home.__init__ = built
        home.from_pretrained = loaded


def _flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return the sizes of a config by name, those of configs inside it with a path."""
    found: dict[str, Any] = {}
    for name, value in vars(config).items():
        if name.startswith("_"):
            continue
        if hasattr(value, "sub_configs"):
            found |= _flat(value, f"{prefix}{name}.")
        elif isinstance(value, int | None):
            found[prefix + name] = value
    return found
