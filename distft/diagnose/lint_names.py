"""What the lint takes for a collective, for a rank, and for a value that ranks do not share."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# torch.distributed: every rank of the group calls. Sends and receives are by rank on purpose.
TORCH = _words(
    "all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_reduce "
    "all_reduce_coalesced all_to_all all_to_all_single barrier broadcast broadcast_object_list "
    "gather gather_object init_device_mesh monitored_barrier new_group new_subgroups reduce "
    "reduce_scatter reduce_scatter_tensor scatter scatter_object_list"
)
# Functions of torch's checkpoints and of sharded modules.
TORCH_STATE = _words(
    "get_model_state_dict get_optimizer_state_dict get_state_dict set_model_state_dict "
    "set_optimizer_state_dict set_state_dict"
)
# Methods that are collectives whatever they are called on.
METHODS = _words("full_tensor gather_for_metrics save_16bit_model wait_for_everyone")
# Methods of objects that are known by what made them, or by their name.
OF_KIND: Mapping[str, frozenset[str]] = {
    "strategy": _words(
        "apply backward clip_grad_norm_ consolidate count_loss_tokens eval_step evaluate "
        "expert_load gather_gradients gather_weights load reshard save train_step"
    ),
    "trainer": _words("evaluate predict save_model save_state train"),
    "accelerator": _words(
        "backward gather get_state_dict load_state prepare reduce save_state pad_across_processes "
        "clip_grad_norm_"
    ),
    "engine": _words("backward save_checkpoint load_checkpoint step"),
}
SAVES = _words(
    "save save_model save_state save_checkpoint save_16bit_model consolidate get_state_dict "
    "get_model_state_dict full_tensor"
)
# Classes and functions whose result is of a kind.
MAKERS: Mapping[str, str] = {
    **dict.fromkeys(
        ["DDP", "ZeRO1", "ZeRO2", "ZeRO3", "FSDP2", "HSDP", "TP", "EP", "NDParallel", "strategy"],
        "strategy",
    ),
    "Accelerator": "accelerator",
}
# Names and attributes that say which rank this is.
RANKS = _words(
    "rank local_rank global_rank process_index local_process_index dp_rank tp_rank "
    "dp_shard_rank is_main_process is_local_main_process is_world_process_zero "
    "is_local_process_zero is_global_zero is_rank_zero is_rank_0 is_master master_process "
    "is_main should_save"
)
# Words in the name of what has a `.rank` that is that of a matrix, as of LoRA.
MATRICES = ("config", "cfg", "lora", "peft", "adapter")
RANK_CALLS = _words(
    "get_rank get_node_local_rank get_local_rank group_rank is_main_process "
    "is_world_process_zero is_local_process_zero is_rank_zero is_rank_0"
)
RANK_VARIABLES = frozenset(("RANK", "LOCAL_RANK", "SLURM_PROCID"))
# Calls whose value each rank has for itself: numbers of its own batch, clocks, chance, files.
LOCAL_CALLS = _words(
    "item isnan isinf isfinite time perf_counter monotonic random rand randint exists is_file "
    "is_dir memory_allocated max_memory_allocated mem_get_info"
)
# Modules that make a script one of many ranks.
DISTRIBUTED = ("torch.distributed", "accelerate", "deepspeed", "distft", "lightning")


def last_name(node: ast.expr) -> str:
    """Return the last part of a dotted name, or nothing.

    >>> last_name(ast.parse("torch.distributed.barrier", mode="eval").body)
    'barrier'
    """
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def dotted(node: ast.expr) -> str:
    """Return a dotted name as it is written, or nothing.

    >>> dotted(ast.parse("torch.distributed.barrier", mode="eval").body)
    'torch.distributed.barrier'
    """
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


class Names:
    """The names of one module: what was imported from where, and objects of known kinds."""

    def __init__(self, tree: ast.Module) -> None:
        self.modules: dict[str, str] = {}
        self.imported: dict[str, str] = {}
        self.kinds: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    name = alias.asname or alias.name.partition(".")[0]
                    self.modules[name] = alias.name if alias.asname else name
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self.imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                self._assigned(node.targets, node.value)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self._assigned([node.target], node.value)
            elif isinstance(node, ast.arg) and node.annotation is not None:
                kind = MAKERS.get(last_name(node.annotation), "")
                if kind and (kind != "strategy" or self._is_ours(node.annotation)):
                    self.kinds[node.arg] = kind

    @property
    def is_distributed(self) -> bool:
        """Whether the module uses anything that runs on many ranks."""
        return any(name.startswith(DISTRIBUTED) for name in self._used()) or any(
            "Trainer" in name for name in self.imported
        )

    def _used(self) -> set[str]:
        return {*self.modules.values(), *self.imported.values()}

    def _assigned(self, targets: Sequence[ast.expr], value: ast.expr) -> None:
        if not isinstance(value, ast.Call):
            return
        maker = last_name(value.func)
        kind = MAKERS.get(maker, "trainer" if maker.endswith("Trainer") else "")
        if maker in ("DDP", "strategy") and not self._is_ours(value.func):
            # torch's DistributedDataParallel is often called so.
            kind = ""
        for target in targets:
            if dotted(target) and kind:
                self.kinds[dotted(target)] = kind
            first = target.elts[0] if isinstance(target, ast.Tuple) and target.elts else None
            if isinstance(first, ast.Name) and dotted(value.func) == "deepspeed.initialize":
                self.kinds[first.id] = "engine"

    def _is_ours(self, func: ast.expr) -> bool:
        name = dotted(func)
        return self.full(name).startswith("distft")

    def _kind_by_name(self, owner: str) -> str:
        """Return the kind of what was made elsewhere, such as an argument, by what it is called."""
        before, _, name = owner.rpartition(".")
        if before not in ("", "self"):
            return ""
        ours = any(full.startswith("distft") for full in self._used())
        known = ("accelerator", "trainer", "strategy") if ours else ("accelerator", "trainer")
        return name if name in known else ""

    def full(self, name: str) -> str:
        """Return a dotted name with what its first part was imported as."""
        first, _, rest = name.partition(".")
        origin = self.imported.get(first) or self.modules.get(first) or first
        return f"{origin}.{rest}" if rest else origin

    def collective(self, call: ast.Call) -> str:
        """Return the name of the collective that a call is, or nothing."""
        name = last_name(call.func)
        full = self.full(dotted(call.func))
        if name in TORCH and full.startswith(("torch.distributed.", "deepspeed.comm.")):
            return name
        if name in TORCH_STATE and full.startswith("torch.distributed.checkpoint"):
            return name
        if name in ("save", "load") and full.startswith("torch.distributed.checkpoint"):
            return f"dcp.{name}"
        if isinstance(call.func, ast.Attribute):
            if name in METHODS:
                return name
            owner = dotted(call.func.value)
            kind = self.kinds.get(owner, "")
            if not kind:
                kind = self._kind_by_name(owner)
            if name in OF_KIND.get(kind, ()):
                return f"{owner}.{name}"
        return ""
