"""What DeepSpeed compiles for single features, and what a user reads where it cannot.

`tests/deepspeed/test_private_names.py` fails first when one of its names moves.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from distft.process_group import raise_together

if TYPE_CHECKING:
    from torch import nn


def has_op(accelerator: Any, builder: str) -> bool:
    """Return whether DeepSpeed can build one of its ops on this machine.

    Args:
        accelerator: DeepSpeed's accelerator.
        builder: Name of the class that builds the op.

    Collective: none.
    """
    made = accelerator.create_op_builder(builder)
    # On an accelerator that lacks an op it is one that only raises, and says it is compatible.
    if made is None or type(made).__name__ == "NotImplementedBuilder":
        return False
    return bool(made.is_compatible())


def check_quantizer(strategy: Any, accelerator: Any) -> None:
    """Raise on every rank where weights or gradients cannot be quantized.

    Raises:
        RuntimeError: DeepSpeed's quantizer op does not build on a rank; or gradients are to be
            quantized, whose kernel reads fp16, which no precision here has.

    Collective: every rank.
    """
    error = None
    if strategy.quantized_gradients:
        error = RuntimeError(
            f"{strategy!r}: DeepSpeed's kernel swizzle_quant reads 2-byte fp16 gradients without "
            f"asking for their dtype, and precision={strategy.precision!r} has none: they would be "
            "noise. Leave quantized_gradients out; traffic() says what it would save."
        )
    elif not has_op(accelerator, "QuantizerBuilder"):
        error = RuntimeError(
            f"{strategy!r} needs DeepSpeed's quantizer op, CUDA kernels that do not build on "
            f"1 or more ranks ({accelerator.device_name()}). Leave quantized_weights out, or "
            "install the CUDA toolkit (nvcc) on machines with GPUs."
        )
    raise_together(error)


def check_async_io(strategy: Any, accelerator: Any) -> None:
    """Load the op that reads and writes a disk; the first time it is compiled, for minutes.

    Raises:
        RuntimeError: It does not build on a rank, on every rank.

    Collective: every rank.
    """
    error = None
    try:
        builder = accelerator.create_op_builder("AsyncIOBuilder")
        # Asked here: it compiles another op for a minute before it looks for libaio itself. One
        # that came with the installation needs no headers.
        installed = find_spec(builder.absolute_name()) is not None
        if not installed and not builder.is_compatible():
            raise RuntimeError("no program that calls io_submit links")
        builder.load(verbose=False)
    except Exception as why:
        error = RuntimeError(
            f"{strategy!r} needs DeepSpeed's async_io op, which does not build on 1 or more ranks: "
            f"it takes a C++ compiler, ninja and libaio with its headers ({_first_line(why)}). "
            "Install libaio-dev (Debian) or libaio-devel (Red Hat), set CFLAGS and LDFLAGS where "
            "it lies elsewhere, or use offload='params'."
        )
        error.__cause__ = why
    raise_together(error)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def check_parts(strategy: Any, model: nn.Module, ranks: int) -> None:
    """Raise where a rank's part of a parameter cannot be quantized.

    Raises:
        ValueError: The first parameter whose part is no multiple of 8 elements.

    Collective: none.
    """
    for name, parameter in model.named_parameters():
        part = -(-parameter.numel() // ranks)
        if part % 8:
            raise ValueError(
                f"{strategy!r}: on {ranks} ranks each has {part} elements of {name}, and int8 "
                "weights travel in multiples of 8. Leave quantized_weights out, or use another "
                "number of ranks."
            )
