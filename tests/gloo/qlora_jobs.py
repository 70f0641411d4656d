"""What the ranks do in the tests of QLoRA; module-level, so that ranks find it by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import distft
from distft.peft import attach_adapters
from distft.quantized import packed_in, packed_layers
from distft.testing import tiny_batches, tiny_model
from distft.testing.runs import Training
from tests.gloo.lora_jobs import PROBE, fix_values, lora_config

LORA = {"target_modules": ["q_proj", "down_proj"]}


def config(dtype: str = "float32", storage: str | None = None, nested: bool = True) -> Any:
    """Return a config of nf4 that computes in a dtype and stores bytes in it or another."""
    import torch
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=getattr(torch, dtype),
        bnb_4bit_quant_storage=getattr(torch, storage or dtype),
    )


def quantized(
    name: str = "L",
    dtype: str = "float32",
    storage: str | None = None,
    nested: bool = True,
    quantization: Any = None,
    **changes: Any,
) -> Any:
    """Return a tiny model as transformers quantizes it."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    with TemporaryDirectory() as folder:
        # save_pretrained would write on rank 0 alone.
        whole = tiny_model(name, **changes)
        whole.config.to_json_file(f"{folder}/config.json")
        save_file(whole.state_dict(), f"{folder}/model.safetensors", metadata={"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            quantization_config=quantization or config(dtype, storage, nested),
            device_map={"": "cpu"},
        )
    return model.train()


def as_bytes(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors with those of packed bytes as bytes, which can be compared."""
    import torch

    return {
        name: tensor.contiguous().view(torch.uint8) if _is_packed(name, tensor) else tensor
        for name, tensor in tensors.items()
    }


def _is_packed(name: str, tensor: Any) -> bool:
    return name.endswith("proj.base_layer.weight") or (
        name.endswith("proj.weight") and tensor.dim() == 2 and tensor.shape[1] == 1
    )


@dataclass(frozen=True)
class QloraTraining(Training):
    """A training of adapters with fixed values on a quantized model."""

    lora: Mapping[str, Any] = field(default_factory=lambda: dict(LORA))
    nested: bool = True

    def build(self) -> Any:
        """Return the PEFT model at its start."""
        model = quantized(self.model, nested=self.nested, **self.changes)
        return fix_values(attach_adapters(model, lora_config(**self.lora), seed=5))


def train_under(strategy: Any, training: QloraTraining) -> Any:
    """Return the record of this rank, packed weights as bytes."""
    from distft.testing.runs import train_under as train

    found = train(strategy, training)
    return replace(found, weights=as_bytes(found.weights))


def apply(strategy: Any, model: Any, lora: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
    """Return what `apply` makes of a model with adapters of fixed values."""
    import torch

    distft.init(seed=3)
    made = fix_values(attach_adapters(model, lora_config(**(lora or LORA)), seed=5))
    return strategy.apply(made, partial(torch.optim.AdamW, lr=1e-2))


def step(strategy: Any, model: Any, optimizer: Any, number: int) -> float:
    """Make one step and return its loss."""
    batches = tiny_batches([3 + (5 * row) % 12 for row in range(6)], seed=100 + number)
    mine = batches[strategy.dp_rank :: strategy.dp_size]
    return strategy.train_step(model, optimizer, mine, max_grad_norm=1.0).loss


def logits_of(model: Any) -> Any:
    """Return the logits of the probe, in training mode: bitsandbytes has another kernel beside."""
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor(PROBE)).logits.float()


def refusals(strategy: Any, cases: Mapping[str, Mapping[str, Any]], peft: bool) -> dict[str, str]:
    """Return what `apply` says to models, by case."""
    import torch

    distft.init(seed=3)
    found = {}
    for name, changes in cases.items():
        model = quantized(**changes)
        try:
            strategy.apply(
                model,
                partial(torch.optim.AdamW, lr=1e-3),
                peft_config=lora_config(**LORA) if peft else None,
            )
            found[name] = ""
        except ValueError as error:
            found[name] = str(error)
    return found


def logits_under(strategy: Any, dtype: str) -> Any:
    """Return the logits of a quantized model under a strategy, and the loss of a step."""
    model, optimizer = apply(strategy, quantized(dtype=dtype))
    return logits_of(model), step(strategy, model, optimizer, 0)


def train_prepared(strategy: Any) -> dict[str, Any]:
    """Prepare for k-bit training, train, and return bytes and dtypes before and after."""
    import torch
    from peft import prepare_model_for_kbit_training

    from distft.measure import model_state_bytes
    from distft.spec import ModelSpec

    prepared = prepare_model_for_kbit_training(
        quantized(dtype="bfloat16"), use_gradient_checkpointing=False
    )
    lifted = sum(p.dtype == torch.float32 for p in prepared.parameters())
    distft.init(seed=3)
    made = fix_values(attach_adapters(prepared, lora_config(**LORA), seed=5))
    before = as_bytes({name: p.detach().clone() for name, p in made.named_parameters()})
    spec = ModelSpec.from_model(made)
    model, optimizer = strategy.apply(made, partial(torch.optim.AdamW, lr=1e-2))
    losses = [step(strategy, model, optimizer, number) for number in range(2)]
    after = strategy.gather_weights(model)
    return {
        "lifted": lifted,
        "losses": losses,
        "before": before,
        "after": as_bytes(after),
        "dtypes": {name: tensor.dtype for name, tensor in after.items()},
        "held": model_state_bytes(model, optimizer).parameters,
        "spec": spec,
    }


def with_nan_patterns(model: Any) -> Any:
    """Put pairs of bytes that are NaN in bf16, and in fp32, into every packed weight."""
    import torch

    generator = torch.Generator().manual_seed(1)
    for layer in packed_layers(model).values():
        raw = layer.weight.data.view(torch.uint8).view(-1)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
        pairs = raw.view(torch.int16)
        pairs[::5], pairs[1::5], pairs[2::5] = 0x7FC1, -1, 0x7F81
    return model


def packed_and_scales(strategy: Any, model: Any) -> dict[str, Any]:
    """Return packed weights as bytes and their scales, whole, by name."""
    inner = distft.unwrap(model)
    tensors = {**strategy.gather_weights(model), **dict(inner.named_buffers())}
    return {
        name: tensor.detach().clone()
        for name, tensor in as_bytes(tensors).items()
        if name in packed_in(tensors)
    }


def save_patterns(strategy: Any, path: Path) -> dict[str, Any]:
    """Train a step on weights full of NaN patterns, save, and return what is held."""
    model, optimizer = apply(strategy, with_nan_patterns(quantized(dtype="bfloat16")))
    step(strategy, model, optimizer, 0)
    strategy.save(path, model, optimizer, step=1)
    return {"held": packed_and_scales(strategy, model), "logits": logits_of(model)}


def load_patterns(strategy: Any, path: Path, out: Path | None = None) -> dict[str, Any]:
    """Load into a model of other values; return what is held, and save it again."""
    model, optimizer = apply(strategy, quantized(dtype="bfloat16", seed=9))
    state = strategy.load(path, model, optimizer)
    if out is not None:
        strategy.save(out, model, optimizer, step=state.step)
    return {"held": packed_and_scales(strategy, model), "logits": logits_of(model)}


def train_and_save(strategy: Any, path: Path) -> dict[str, Any]:
    """Make two steps, save, and return the logits, the next two losses and the last weights."""
    model, optimizer = apply(strategy, quantized())
    for number in range(2):
        step(strategy, model, optimizer, number)
    strategy.save(path, model, optimizer, step=2)
    held = {"logits": logits_of(model), "saved": packed_and_scales(strategy, model)}
    held["losses"] = [step(strategy, model, optimizer, 2 + more) for more in range(2)]
    held["last"] = as_bytes(strategy.gather_weights(model))
    return held


def load_and_step(strategy: Any, path: Path) -> dict[str, Any]:
    """Load into a model of other values and make two more steps."""
    model, optimizer = apply(strategy, quantized(seed=9))
    state = strategy.load(path, model, optimizer)
    losses = [step(strategy, model, optimizer, state.step + more) for more in range(2)]
    return {"losses": losses, "last": as_bytes(strategy.gather_weights(model))}


def refused_loads(strategy: Any, path: Path) -> list[str]:
    """Return what loads into models of other packed weights say."""
    from transformers import BitsAndBytesConfig

    fp4 = BitsAndBytesConfig(**{**config().to_dict(), "bnb_4bit_quant_type": "fp4"})
    said = []
    for other, changes in (
        (strategy, {"quantization": fp4}),
        (replace(strategy, precision="bf16-mixed"), {"dtype": "bfloat16"}),
    ):
        model, optimizer = apply(other, quantized(**changes))
        try:
            other.load(path, model, optimizer)
        except ValueError as error:
            said.append(str(error))
    return said


def measure(strategy: Any, nested: bool) -> dict[str, Any]:
    """Return this rank's bytes, those of packed weights, and the collectives of a step."""
    import torch

    from distft.measure import count_collectives, model_state_bytes
    from distft.spec import ModelSpec

    dtype = "float32" if strategy.precision == "fp32" else "bfloat16"
    distft.init(seed=3)
    made = attach_adapters(quantized(dtype=dtype, nested=nested), lora_config(**LORA), seed=0)
    spec = ModelSpec.from_model(made)
    model, optimizer = strategy.apply(made, partial(torch.optim.AdamW, lr=1e-3))

    def window(grad_accum: int) -> None:
        batches = tiny_batches([9, 12, 7][:grad_accum], seed=strategy.dp_rank)
        strategy.train_step(model, optimizer, batches, max_grad_norm=0.1)

    for _ in range(2):
        window(1)
    with count_collectives() as counted:
        window(3)
    records = [(record.op, record.num_bytes, record.group_size) for record in counted.records]
    wire_bytes = counted.wire_bytes
    optimizer.zero_grad()
    strategy.backward(model(**tiny_batches([9])[0]).loss)
    packed = [layer.weight for layer in packed_layers(distft.unwrap(model)).values()]
    return {
        "spec": spec,
        "state": model_state_bytes(model, optimizer),
        "records": records,
        "wire_bytes": wire_bytes,
        "packed": sum(_local_bytes(weight) for weight in packed),
    }


def _local_bytes(weight: Any) -> int:
    local = (
        weight.to_local() if hasattr(weight, "to_local") else getattr(weight, "ds_tensor", weight)
    )
    return int(local.numel() * local.element_size())


def read_quantized(strategy: Any, folder: Path, dtype: str, nested: bool) -> dict[str, Any]:
    """Let `load_model` quantize, and return what came of it and the loss of a step."""
    import torch

    distft.init(seed=3)
    quantization = config(dtype, "uint8", nested)
    model = distft.load_model(
        folder, strategy, peft_config=lora_config(**LORA), quantization_config=quantization
    )
    model, optimizer = strategy.apply(model, partial(torch.optim.AdamW, lr=1e-2))
    held = packed_and_scales(strategy, model)
    return {"held": held, "loss": step(strategy, model, optimizer, 0)}


def switch_adapters(strategy: Any) -> dict[str, Any]:
    """Return logits with adapters, without, and with another adapter that is there."""
    distft.init(seed=3)
    made: Any = attach_adapters(quantized(), lora_config(**LORA), seed=5)
    made.add_adapter("other", lora_config(**LORA))
    fix_values(made)
    import torch

    model, _ = strategy.apply(made, partial(torch.optim.AdamW, lr=1e-2))
    inner: Any = distft.unwrap(model)
    found = {"both": [logits_of(model)]}
    with inner.disable_adapter():
        found["none"] = logits_of(model)
    inner.set_adapter("other")
    found["other"] = logits_of(model)
    inner.set_adapter("default")
    found["both"].append(logits_of(model))
    return found


def train_plainly(folder: Path, changes: Mapping[str, Any]) -> Any:
    """Return the log of TRL's own trainer on quantized weights, in one process."""
    import os

    import torch
    from trl import SFTTrainer

    from tests.gloo.trainer_jobs import arguments, rows, tokenizer

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    trainer = SFTTrainer(
        quantized(),
        arguments(folder, **changes),
        train_dataset=rows(),
        processing_class=tokenizer(),
        peft_config=lora_config(**LORA),
    )
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            # TRL makes adapters on quantized weights bf16; a strategy has the dtype of its weights.
            parameter.data = parameter.data.to(torch.float32)
    trainer.train()
    return trainer.state.log_history


def train(folder: Path, strategy: Any, changes: Mapping[str, Any], resume: Any = None) -> Any:
    """Return the log of a run of the Trainer under a strategy, and what it published."""
    from safetensors.torch import load_file

    from tests.gloo.trainer_jobs import arguments, rows, tokenizer

    trainer = distft.Trainer(
        quantized(),
        arguments(folder, **changes),
        strategy=strategy,
        train_dataset=rows(),
        processing_class=tokenizer(),
        peft_config=lora_config(**LORA),
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / "published"))
    return trainer.state.log_history, load_file(folder / "published/adapter_model.safetensors")


def train_loaded(folder: Path, strategy: Any, changes: Mapping[str, Any]) -> Any:
    """Return the log of a run whose model `load_model` has quantized, and the adapters' dtypes."""
    from tests.gloo.trainer_jobs import arguments, rows, tokenizer

    distft.init(seed=3)
    trainer = distft.Trainer(
        distft.load_model(
            folder / "model",
            strategy,
            peft_config=lora_config(**LORA),
            quantization_config=config(storage="uint8"),
        ),
        arguments(folder, **changes),
        strategy=strategy,
        train_dataset=rows(),
        processing_class=tokenizer(),
    )
    trainer.train()
    weights = strategy.gather_weights(trainer.model_wrapped)
    dtypes = {str(tensor.dtype) for name, tensor in weights.items() if ".lora_" in name}
    return trainer.state.log_history, dtypes


def refuse_full_tuning(folder: Path, strategy: Any) -> str:
    """Return what the Trainer says of quantized weights without adapters."""
    from tests.gloo.trainer_jobs import arguments, rows, tokenizer

    try:
        distft.Trainer(
            quantized(),
            arguments(folder),
            strategy=strategy,
            train_dataset=rows(),
            processing_class=tokenizer(),
        )
    except ValueError as error:
        return str(error)
    return ""
