"""A run without memory, without values and without other ranks: torch's private parts for it.

Fake tensors have shapes, dtypes and storages with a size, and no data. A fake process group has
any number of ranks and sends nothing. What a program reads of values is answered here.
`tests/unit/test_dry_run.py` fails first when upstream moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def is_fake(tensor: Any) -> bool:
    """Return whether a tensor, or this rank's part of it, is fake and so has no values.

    Collective: none.
    """
    local = getattr(tensor, "_local_tensor", tensor)
    return any(kind.__name__ == "FakeTensor" for kind in type(local).__mro__)


@contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[None]:
    """Have a process group of any size, in which this process is one rank and all are like it.

    Raises:
        RuntimeError: There is a process group already.

    Collective: none: its collectives move nothing.
    """
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError(
            f"A dry run makes a process group of its own, and this process is in one of "
            f"{dist.get_world_size()} ranks. Call it in a process without distft.init()."
        )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # DTensor remembers layouts with their meshes, whose groups are gone now.
        _clear_sharding_prop_cache()


class FakeTensors:
    """Tensors without values, and what a program reads of them.

    Args:
        read_integer: From an integer tensor of one element to the number that a program reads.
    """

    def __init__(self, read_integer: Callable[[Any], int]) -> None:
        # Registers what collectives do to fake tensors.
        import torch.distributed._tools.fake_collectives  # noqa: F401
        from torch._subclasses.fake_tensor import FakeTensorMode

        self._mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
        self._read_integer = read_integer

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        """Have tensors fake that are made inside, but for positions and what comes of those."""
        with self._mode, _answers(self._read_integer):
            yield

    @contextmanager
    def for_floats(self) -> Iterator[None]:
        """Have floating tensors fake that are made inside.

        Those of whole numbers are real: meshes are made of them, and DDP's ranks tell each other
        the order of buckets in them.
        """
        with _fake_floats(self._mode):
            yield


@contextmanager
def modules_stay() -> Iterator[None]:
    """Have modules stay where and what they are inside: torch cannot move fake parameters.

    PEFT moves an adapter to its layer's device and dtype, which the strategy casts afterwards.

    Collective: none.
    """
    import torch

    kind: Any = torch.nn.Module
    to = kind.to
    kind.to = lambda module, *_, **__: module
    try:
        yield
    finally:
        kind.to = to


def settle_buckets(model: Any) -> None:
    """Have DDP order its buckets by the first backward pass now, and not in the next forward pass.

    It sends their order then, which needs values. Any other model is left alone.

    Collective: none on a fake group.
    """
    reducer = getattr(model, "reducer", None)
    if reducer is not None:
        reducer._rebuild_buckets()


def _fake_floats(mode: Any) -> Any:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class FakeFloats(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            keywords = kwargs or {}
            dtype = keywords.get("dtype") or torch.get_default_dtype()
            takes_none = not any(isinstance(x, torch.Tensor) for x in tree_leaves((args, keywords)))
            # DTensor asks for shapes with fake tensors of its own.
            is_asking = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
            if takes_none and dtype.is_floating_point and not is_asking:
                with mode:
                    return func(*args, **keywords)
            return func(*args, **keywords)

    return FakeFloats()  # type: ignore[no-untyped-call]


def _answers(read_integer: Callable[[Any], int]) -> Any:
    """Answer what is asked of fake values, and keep real what comes of positions alone.

    A model looks whether positions count up, to leave its mask out.
    """
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    aten = torch.ops.aten

    class Answers(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is aten._local_scalar_dense.default and is_fake(args[0]):
                if args[0].dtype == torch.bool:
                    # Whether a norm is finite: it is where nothing goes wrong.
                    return True
                if not args[0].is_floating_point():
                    return read_integer(args[0])
            if func is aten._grouped_mm.default and is_fake(args[0]):
                return _grouped_product(*args, **(kwargs or {}))
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            real = all(not (is_fake(x) or x.is_floating_point() or x.is_meta) for x in tensors)
            if real and (tensors or func.overloadpacket is aten.arange):
                with unset_fake_temporarily():
                    return func(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    return Answers()  # type: ignore[no-untyped-call]


def _grouped_product(left: Any, right: Any, offs: Any = None, *_: Any, **keywords: Any) -> Any:
    """Return what torch's grouped product does; its own rule for fake tensors is for bf16 alone."""
    shape: tuple[int, ...] = (left.shape[-2], right.shape[-1])
    if left.dim() == right.dim() == 2:
        shape = (offs.numel(), *shape)
    return left.new_empty(shape, dtype=keywords.get("out_dtype"))
