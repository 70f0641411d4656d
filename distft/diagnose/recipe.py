"""What a parity check trains, the same in one process and on every rank."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distft.diagnose.shrink import Shrink, smaller_models
from distft.testing.runs import LOSS_TOKENS

if TYPE_CHECKING:
    from torch import nn

# Of drawn adapters, beside weights of a deviation of 0.02.
SMALL = 0.1

BuildModel = Callable[[], "nn.Module"]
MakeBatches = Callable[[int], Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class FromConfig:
    """Builds a causal language model from the values of a transformers config, weights drawn."""

    values: Mapping[str, Any]

    def __call__(self) -> Any:
        """Return the model."""
        from transformers import AutoConfig, AutoModelForCausalLM

        values = {name: value for name, value in self.values.items() if name != "model_type"}
        config = AutoConfig.for_model(self.values["model_type"], **values)
        return AutoModelForCausalLM.from_config(config)


class CannotBuild(Exception):
    """The user's own code could not be found, or raised; the message says which."""


@dataclass(frozen=True)
class Recipe:
    """A training of some steps on a user's model made small.

    Attributes:
        builder: The user's ``build_model``, pickled: a rank that cannot find it says so.
        shrink: How far its configs are cut; None builds it as it is.
        peft_config: Adapters that `Strategy.apply` attaches, drawn with B not 0, which would hide
            the gradient of A.
        num_micro_batches: Of a step over all ranks.
        rows: Rows of a micro-batch.
        length: Tokens of a row.
        num_steps: Optimizer steps before the save.
        max_norm: Clipping bound.
        learning_rate: Of AdamW.
        make_batches: The user's own micro-batches of a step over all ranks.
        loss_fn: As `Strategy.train_step` takes it.
        count_fn: As `Strategy.train_step` takes it.
        optimizer: Factory of the user's own; default AdamW.
    """

    builder: bytes
    shrink: Shrink | None
    num_micro_batches: int
    peft_config: Any = None
    rows: int = 1
    length: int = 16
    num_steps: int = 3
    max_norm: float = 0.1
    learning_rate: float = 1e-3
    make_batches: MakeBatches | None = None
    loss_fn: Any = None
    count_fn: Any = None
    optimizer: Any = None

    def build(self) -> tuple[nn.Module, dict[str, Any]]:
        """Return the small model in fp32 without dropout, and what of its config was cut.

        Raises:
            CannotBuild: The user's code cannot be found from here, or raised.

        Collective: none.
        """
        from torch import nn

        from distft.process_group import seed_everything

        try:
            build_model = pickle.loads(self.builder)
        except Exception as error:
            raise CannotBuild(
                f"build_model cannot be found by a rank ({type(error).__name__}: {error}). Put it "
                "at the top level of a file that can be imported."
            ) from error
        seed_everything(0)
        small: Any = nullcontext({}) if self.shrink is None else smaller_models(self.shrink)
        try:
            with small as cut:
                model = build_model()
        except Exception as error:
            raise CannotBuild(f"build_model raised {type(error).__name__}: {error}") from error
        if not isinstance(model, nn.Module):
            raise CannotBuild(
                f"build_model returned a {type(model).__name__}, and a torch module is needed."
            )
        return _without_chance(_with_factors(_in_fp32(model))), dict(cut)

    def factory(self) -> Any:
        """Return what builds the optimizer.

        AdamW moves a weight whose gradient is near its epsilon by the gradient's rounding times
        ``lr / eps``, 1e5 with torch's own 1e-8; 1e-5 leaves 100.

        Collective: none.
        """
        from functools import partial

        from torch.optim import AdamW

        return self.optimizer or partial(AdamW, lr=self.learning_rate, eps=1e-5)

    def batches(self, model: Any, step: int) -> list[Mapping[str, Any]]:
        """Return the micro-batches of a step over all ranks; the second step lacks one.

        Raises:
            CannotBuild: The model has no vocabulary to draw tokens of.

        Collective: none.
        """
        if self.make_batches is not None:
            return list(self.make_batches(step))
        # The step after a load is made many times: one micro-batch a rank is enough there.
        count = self.num_micro_batches // (2 if step == self.num_steps else 1) - (step == 1)
        return [self._batch(model, step, index) for index in range(count)]

    def _batch(self, model: Any, step: int, index: int) -> Mapping[str, Any]:
        import torch

        size = vocabulary(model)
        generator = torch.Generator().manual_seed(1000 * step + index)
        ids = torch.randint(3, size, (self.rows, self.length), generator=generator)
        labels = ids.clone()
        for row in range(self.rows):
            # Unequal numbers of loss tokens, so that a mean of means is visibly wrong.
            tokens = LOSS_TOKENS[(index + row) % len(LOSS_TOKENS)]
            labels[row, : max(1, self.length - tokens)] = -100
        return {"input_ids": ids, "labels": labels}


def vocabulary(model: Any) -> int:
    """Return the number of tokens of a model.

    Raises:
        CannotBuild: Its config does not say.

    Collective: none.
    """
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    size = getattr(config, "vocab_size", None)
    if not isinstance(size, int):
        raise CannotBuild(
            f"{type(model).__name__} has no vocab_size in its config, so no rows can be drawn for "
            "it. Pass batches=, and loss_fn= and count_fn= where it is no language model."
        )
    return size


def without_zeros(peft_config: Any) -> Any:
    """Return a LoRA config whose factors both start with values, and that drops nothing out.

    With B drawn as A is, an adapter is larger than the layer it adapts, and the loss so steep that
    the rounding of weights shows in the next norm: ``lora_alpha`` is a tenth.

    Collective: none.
    """
    if peft_config is None:
        return None
    changes: dict[str, Any] = {"lora_dropout": 0.0}
    # Other initial values are computed of the weights: those are the user's subject.
    if getattr(peft_config, "init_lora_weights", True) in (True, "gaussian"):
        changes["init_lora_weights"] = False
        changes["lora_alpha"] = SMALL * peft_config.lora_alpha
    return dataclasses.replace(peft_config, **changes)


def _in_fp32(model: nn.Module) -> nn.Module:
    """Cast what is floating; packed weights stay as they are."""
    from itertools import chain

    for tensor in chain(model.parameters(), model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.float()
    return model


def _with_factors(model: nn.Module) -> nn.Module:
    """Give adapters that the user attached values in place of zeros, which prove nothing."""
    import torch

    from distft.peft import draw_adapter

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name and not bool(parameter.any()):
                drawn = draw_adapter(name, parameter.shape, False, 0)
                if drawn is not None:
                    parameter.copy_(SMALL * drawn)
    return model


def _without_chance(model: nn.Module) -> nn.Module:
    """Return a model in training mode that drops nothing out: ranks draw other masks than one."""
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "attn_dropout", "hidden_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model.train()
