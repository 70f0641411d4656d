"""What a script does beside training, with state on the host: loading, adapters, evaluation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import AdamW

import distft
from distft import FSDP2, ZeRO2, ZeRO3
from distft.testing import tiny_batches, tiny_model
from tests.gloo.lora_jobs import lora_config

OFFLOADED = [ZeRO2(offload="optimizer"), ZeRO3(offload="params"), FSDP2(offload="params")]


def uses(strategy: Any, folder: Path, lora: bool) -> Any:
    """Load, train, evaluate, generate and gather; the same without offload."""
    found = []
    for which in (strategy, replace(strategy, offload=None)):
        distft.init(seed=0)
        model = distft.load_model(folder, which)
        config = lora_config(init_lora_weights=False) if lora else None
        if lora:
            model = tiny_model("Lt")
        model, optimizer = which.apply(model, partial(AdamW, lr=1e-3), peft_config=config)
        rows = tiny_batches([5, 9, 3, 12])[which.dp_rank :: which.dp_size]
        losses = [
            which.train_step(model, optimizer, rows, max_grad_norm=0.1).loss for _ in range(3)
        ]
        losses.append(which.eval_step(model, rows).loss)
        ids = which.generate(model, input_ids=torch.ones(1, 3, dtype=torch.long), max_new_tokens=4)
        found.append((losses, ids.tolist(), which.gather_weights(model)))
    return found


@pytest.mark.parametrize("lora", [False, True], ids=["loaded", "adapters"])
@pytest.mark.parametrize("strategy", OFFLOADED, ids=str)
def test_a_script_gives_the_same_with_and_without_offload(pools, tmp_path, strategy, lora):
    tiny_model("Lt").save_pretrained(tmp_path)
    for offloaded, plain in pools(2).run(uses, strategy, tmp_path, lora):
        assert offloaded[0] == pytest.approx(plain[0], rel=1e-6)
        assert offloaded[1] == plain[1]
        assert offloaded[2].keys() == plain[2].keys()
        for name, weight in plain[2].items():
            assert (offloaded[2][name] - weight).abs().max() <= 1e-5, name
