"""The weights of a folder for one model: where each tensor lies, and how it is read."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

from distft.checkpoint.placement import held_blocks, narrow
from distft.checkpoint.quantize import empty_layers
from distft.checkpoint.safetensors_reader import FileTensor, Reader
from distft.peft import source_name
from distft.process_group import local_device
from distft.quantized import quantize_into

if TYPE_CHECKING:
    from torch import Tensor, nn

logger = logging.getLogger("distft")

# Called on a model with adapters before their values are drawn.
Prepare = Callable[[Any], None]


@dataclass
class Weights:
    """Where every tensor of a model comes from.

    Attributes:
        model: The model, its parameters on the meta device.
        pieces: For each name, the tensors in files that make it up, end to end.
        held: Tensors that are in memory already, where the whole model was read.
        advance: Called once for each tensor that has been read.
        adapt: From the model to one with adapters, where there are to be any; it takes what
            `attach` takes.
        quantization: The config by which linear layers are quantized as they are read, or None.
        packed: After `attach`, those layers by the names of their weights.
    """

    model: nn.Module
    pieces: Mapping[str, Sequence[FileTensor]]
    held: Mapping[str, Tensor] = field(default_factory=dict)
    advance: Callable[[], None] = lambda: None
    reader: Reader = field(default_factory=Reader)
    adapt: Callable[[nn.Module, Prepare | None], nn.Module] | None = None
    quantization: Any = None
    packed: Mapping[str, Any] = field(default_factory=dict)
    _last: tuple[str, Any] = ("", None)

    def attach(self, prepare: Prepare | None = None) -> None:
        """Put the adapters on, after layers are split and before parameters are.

        Their values, which no file of the model holds, are whole in memory from here on.

        Args:
            prepare: As for `attach_adapters`.

        Raises:
            ValueError: The adapters do not fit the model.

        Collective: none.
        """
        from distft.checkpoint.skeleton import replace_parameters

        if self.adapt is None:
            return
        first = {name: names[0] for names in names_of(self.model).values() for name in names}
        self.model = self.adapt(self.model, prepare)
        held, pieces = dict[str, Any](), dict[str, Sequence[FileTensor]]()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            source = first.get(source_name(name) or "")
            if source is None:
                held[name] = tensor.detach()
            elif source in self.held:
                held[name] = self.held[source]
            else:
                pieces[name] = self.pieces[source]
        self.held, self.pieces = held, pieces
        replace_parameters(self.model, lambda _, p: p if p.is_meta else p.detach().to("meta"))
        if self.quantization is not None:
            self.packed = empty_layers(self.model, self.quantization)

    def fill(self, name: str, start: int, out: Tensor) -> None:
        """Fill a contiguous tensor with the elements of a named one, from ``start`` on.

        Collective: none.
        """
        self._fill(name, start, out)
        self.advance()

    def fill_part(self, name: str, tensor: Any, part: Tensor) -> None:
        """Fill this rank's part of a DTensor, reading the bytes that it holds and no others.

        Collective: none.
        """
        import torch

        for block in held_blocks(tensor):
            if 0 in block.size:
                continue
            # Trailing dimensions that the block has whole lie together in the file.
            whole = len(block.size)
            while whole and block.size[whole - 1] == tensor.shape[whole - 1]:
                whole -= 1
            run = math.prod(block.size[max(whole - 1, 0) :])
            target = narrow(part, block.local, block.size)
            direct = target.is_contiguous()
            rows = (
                target
                if direct
                else torch.empty_like(target, memory_format=torch.contiguous_format)
            )
            flat = rows.view(-1)
            strides = [math.prod(tensor.shape[dim + 1 :]) for dim in range(len(block.size))]
            outer = product(*(range(size) for size in block.size[: max(whole - 1, 0)]))
            for number, index in enumerate(outer):
                first = sum(
                    (block.start[dim] + (index[dim] if dim < len(index) else 0)) * stride
                    for dim, stride in enumerate(strides)
                )
                self._fill(name, first, flat[number * run : (number + 1) * run])
            if not direct:
                target.copy_(rows)
        self.advance()

    def _fill(self, name: str, start: int, out: Tensor) -> None:
        whole = self._pack(name) if name in self.packed else self.held.get(name)
        if whole is not None:
            whole = whole.detach().reshape(-1)
            out.detach().view(-1).copy_(whole[start : start + out.numel()])
        else:
            self.reader.fill(self.pieces[name], start, out)

    def _pack(self, name: str) -> Tensor:
        """Return the packed bytes of a weight, whole, and let its layer keep its scales.

        Scales are of blocks that cross rows, quantized ones of all blocks: a rank that holds a part
        reads the whole tensor, and forgets it with the next one.
        """
        import torch

        if self._last[0] != name:
            self._last = ("", None)
            layer = self.packed[name]
            shape = (layer.out_features, layer.in_features)
            is_transposed = layer.source_cls is not torch.nn.Linear
            # As from_pretrained: the weight in the dtype of compute, then its blocks.
            whole = torch.empty(
                shape[::-1] if is_transposed else shape,
                dtype=self.quantization.bnb_4bit_quant_storage,
                device=local_device(),
            )
            self.reader.fill(self.pieces[name], 0, whole)
            whole = whole.T.contiguous() if is_transposed else whole
            self._last = (name, quantize_into(layer, whole))
        found: Tensor = self._last[1]
        return found

    def fill_buffers(self) -> None:
        """Give every buffer its value, on this rank's device: read, or as its build computed it.

        Collective: none.
        """
        import torch

        device = local_device()
        saved = self.model.state_dict(keep_vars=True)
        for path, module in self.model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                full = f"{path}.{name}" if path else name
                if full in self.held:
                    buffer = self.held[full].detach().clone()
                elif full in saved and full in self.pieces:
                    buffer = torch.empty_like(buffer)
                    self.fill(full, 0, buffer)
                setattr(module, name, buffer.to(device))


def names_of(model: nn.Module) -> dict[int, list[str]]:
    """Return the names of each tensor that a checkpoint holds; a tied one has several.

    Collective: none.
    """
    found: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), []).append(name)
    return found
