"""In which order the modules of a model work, told from the names of its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Protocol

from distft.formulas.fetch import Visit


class Named(Protocol):
    """A parameter with its name and the path of the block it belongs to."""

    @property
    def name(self) -> str:
        """Name in `named_parameters()`."""

    @property
    def unit(self) -> str:
        """Path of the block, or "" for none."""

    @property
    def trainable(self) -> bool:
        """Whether it gets a gradient."""


# What works in which order where registration differs, and modules without parameters that work
# between them ("act_fn", "rotary_emb"), which DeepSpeed counts like any other.
_ORDERS = (
    ("embed_tokens", "rotary_emb", "layers", "norm"),
    ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"),
    ("q_proj", "q_norm", "k_proj", "k_norm", "v_proj", "o_proj"),
    ("gate_proj", "act_fn", "up_proj", "down_proj"),
)
# DeepSpeed gathers a block of experts with its router at once, as which experts work differs
# between ranks.
_LEAF = {"gate", "experts"}
# PEFT's wrappers: what works in them in which order, and what is there and never works.
_ADAPTED = ("base_layer", "lora_dropout", "lora_A", "lora_B")
_NEVER = {"original_module"}
_DICTS = {"lora_A", "lora_B", "lora_dropout", "modules_to_save"}
# What reads the input of the module that it is in, not what worked before it; what reads only
# that; the rest reads all that worked before it in the module.
_READS_INPUT = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "base_layer", "lora_dropout"}
_READS_LAST = {"q_norm", "k_norm", "act_fn", "lora_A", "lora_B"}
_WITHOUT_PARAMETERS = {"act_fn": "gate_proj", "rotary_emb": "embed_tokens"}
# Nothing that it returns has a gradient, so it does not show in the backward pass.
_FORWARD_ONLY = "rotary_emb"


@dataclass
class _Module:
    path: str
    own: list[int] = field(default_factory=list)
    children: dict[str, _Module] = field(default_factory=dict)
    # Gathered at once with all below it since it is compiled.
    is_whole: bool = False
    # Whether the input and the output have gradients: the backward pass comes by only then.
    grad_in: bool = True
    grad_out: bool = True

    @property
    def parameters(self) -> tuple[int, ...]:
        """Indices of what is gathered for it: its own, and all below where it is a leaf."""
        if not self.is_leaf:
            return tuple(self.own)
        return tuple(self._all_below())

    def _all_below(self) -> Iterator[int]:
        yield from self.own
        for child in self.children.values():
            yield from child._all_below()

    @property
    def is_leaf(self) -> bool:
        """Whether it is gathered at once with all that is below it."""
        return self.is_whole or set(self.children) == _LEAF

    def child(self, name: str) -> _Module:
        path = f"{self.path}.{name}" if self.path else name
        return self.children.setdefault(name, _Module(path))

    def ordered(self) -> list[_Module]:
        """Return the children in the order of work."""
        names = [] if self.is_leaf else [name for name in self.children if name not in _NEVER]
        if "base_layer" in names:
            # Dropout, or what stands for it, has no parameters and counts like any other.
            self.child("lora_dropout").child("default")
            return [self.child(name) for name in _ADAPTED]
        for order in _ORDERS:
            if len(names) > 1 and all(name in order for name in names):
                present = [
                    name
                    for name in order
                    if name in names or _WITHOUT_PARAMETERS.get(name) in names
                ]
                return [self.child(name) for name in present]
        return [self.child(name) for name in names]

    @property
    def works(self) -> bool:
        """Whether it is called: a list of blocks is not, nor a dict of adapters.

        PEFT calls the ``forward`` of the model inside, which no hook sees.
        """
        name = self.path.rpartition(".")[2]
        if self.path == "base_model.model" or name in _DICTS:
            return False
        return not (self.children and all(child.isdigit() for child in self.children))

    def flow(self, grad_in: bool, trained: AbstractSet[int]) -> bool:
        """Set which modules see gradients, and return whether the output has one."""
        self.grad_in = grad_in
        grad_out = grad_in or any(index in trained for index in self.own)
        if self.is_leaf:
            grad_out = grad_in or any(index in trained for index in self.parameters)
        so_far = last = grad_in
        for child in self.ordered():
            name = child.path.rpartition(".")[2]
            source = last if name in _READS_LAST else so_far
            last = child.flow(grad_in if name in _READS_INPUT else source, trained)
            so_far = so_far or last
        self.grad_out = grad_out or so_far
        return self.grad_out


def module_visits(
    tensors: Sequence[Named],
    ties: Sequence[tuple[str, str]],
    activation_checkpointing: bool,
    whole_blocks: bool = False,
) -> tuple[Visit, ...]:
    """Return the modules in the order of work, forward and then backward.

    Collective: none.
    """
    units = {tensor.unit for tensor in tensors} - {""}
    root = _tree(tensors, ties, units if whole_blocks else set())
    blocks = units if activation_checkpointing else set()
    frozen = frozenset(index for index, tensor in enumerate(tensors) if not tensor.trainable)
    return (*_forward(root), *_backward(root, blocks, frozen))


def _tree(
    tensors: Sequence[Named], ties: Sequence[tuple[str, str]], whole: AbstractSet[str]
) -> _Module:
    root = _Module("")
    index_of = {tensor.name: index for index, tensor in enumerate(tensors)}
    uses = list(index_of.items()) + [(other, index_of[name]) for other, name in ties]
    for name, index in uses:
        module = root
        for part in name.split(".")[:-1]:
            module = module.child(part)
            module.is_whole = module.path in whole
        module.own.append(index)
    root.flow(False, {index for index, tensor in enumerate(tensors) if tensor.trainable})
    return root


@dataclass(frozen=True)
class Work:
    """A module with parameters of its own, at its place in the order of work.

    Attributes:
        path: Its path.
        own: Indices of its own parameters.
        grad_in: Whether what it reads has a gradient; of experts, the hidden states.
        grad_beside: Whether anything that its siblings made before it has one: a router's choice.
    """

    path: str
    own: tuple[int, ...]
    grad_in: bool
    grad_beside: bool


def works(tensors: Sequence[Named], ties: Sequence[tuple[str, str]]) -> tuple[Work, ...]:
    """Return the modules that have parameters in the order of their forward passes.

    Collective: none.
    """
    trained = {index for index, tensor in enumerate(tensors) if tensor.trainable}
    return tuple(_works(_tree(tensors, ties, set()), trained, False, False))


def _works(
    module: _Module, trained: AbstractSet[int], beside: bool, in_leaf: bool
) -> Iterator[Work]:
    if module.own:
        yield Work(module.path, tuple(module.own), module.grad_in, beside)
    in_leaf = in_leaf or module.is_leaf
    # A leaf is gathered at once; inside, the router works before its experts.
    children = list(module.children.values()) if module.is_leaf else module.ordered()
    so_far = module.grad_in or beside
    for child in sorted(children, key=lambda child: module.is_leaf and _is_experts(child)):
        if in_leaf or _is_experts(child):
            child.grad_in = module.grad_in
        yield from _works(child, trained, so_far, in_leaf)
        so_far = so_far or not trained.isdisjoint(child._all_below())


def _is_experts(module: _Module) -> bool:
    return module.path.endswith(".experts")


def _forward(module: _Module) -> Iterator[Visit]:
    if module.works:
        yield Visit(module.parameters)
    for child in module.ordered():
        yield from _forward(child)


def _backward(
    module: _Module, blocks: AbstractSet[str], frozen: frozenset[int] = frozenset()
) -> Iterator[Visit]:
    if module.path in blocks:
        yield from _recomputed(module, frozen)
        return
    if module.works and module.grad_out and not module.path.endswith(_FORWARD_ONLY):
        # It is told to free them once its input has its gradient.
        yield Visit(module.parameters, frees=module.grad_in)
    for child in reversed(module.ordered()):
        yield from _backward(child, blocks, frozen)


def _recomputed(block: _Module, frozen: frozenset[int]) -> Iterator[Visit]:
    """Yield a block's backward pass with the forward pass inside.

    The first module that needs its input asks for the forward pass, and holds its parameters
    meanwhile. The forward pass ends inside the same module, once that input is there. Where that
    is in an adapted layer, the layer does not end either, and holds its first factor.
    """
    backward = list(_backward(block, frozenset()))
    first = next((index for index, visit in enumerate(backward) if visit.own), None)
    if first is None:
        # Nothing in it is trained, nor before it.
        return
    yield from backward[:first]
    yield Visit(backward[first].own, frees=False)
    held = _first_factor(block, backward[first].own)
    *forward, last = (
        visit._replace(frees=visit.frees and not held & set(visit.own)) for visit in _forward(block)
    )
    used = {index for visit in (*forward, last) for index in visit.own}
    yield from forward
    yield last._replace(recomputed=tuple(sorted(used & frozen)))
    yield from backward[first + 1 :]


def _first_factor(module: _Module, second: Sequence[int]) -> set[int]:
    """Return the parameters of the first factor beside a second one, or none.

    PEFT's layer reads the dtype of its first factor, and the engine gathers for a module what its
    forward pass reads.
    """
    for child in module.children.values():
        if "lora_B" in child.children and set(second) <= set(child.children["lora_B"]._all_below()):
            return set(child.children["lora_A"]._all_below())
        if found := _first_factor(child, second):
            return found
    return set()
