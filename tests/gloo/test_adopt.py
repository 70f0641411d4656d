"""Folders that other tools really wrote: what each is, and the runs that go on here."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distft
from distft import FSDP2, ZeRO1, ZeRO2, ZeRO3
from distft.testing import RanksFailed, WorkerPool, tiny_batches, tiny_model

ZERO = {1: ZeRO1, 2: ZeRO2, 3: ZeRO3}
LOST = ["scheduler", "random state", "data position"]


def rows(count: int = 4) -> list[dict[str, torch.Tensor]]:
    return [{key: value[0] for key, value in b.items()} for b in tiny_batches([5] * count)]


def own_rows(step: int) -> list[dict[str, torch.Tensor]]:
    """Return this rank's batch: as many loss tokens as on the other, so that means agree."""
    return [tiny_batches([5, 5], seed=step)[dist.get_rank()]]


# ---- written in one process --------------------------------------------------------------------


def write_trainer(out: Path) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=2,
        save_steps=1,
        save_strategy="steps",
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    Trainer(model=tiny_model("L"), args=arguments, train_dataset=rows()).train()


def write_accelerate(out: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = tiny_model("L")
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    accelerator.backward(model(**tiny_batches([5])[0]).loss)
    optimizer.step()
    accelerator.save_state(str(out))


def write_adapter(out: Path) -> None:
    from peft import LoraConfig, get_peft_model

    get_peft_model(tiny_model("L"), LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(out)


def write_model(out: Path) -> None:
    tiny_model("L").bfloat16().save_pretrained(out, max_shard_size="20KB")


@pytest.fixture(scope="module")
def writer() -> Iterator[WorkerPool]:
    """Return a rank of its own, since Trainer and Accelerate leave much behind in a process."""
    with WorkerPool(1) as pool:
        yield pool


def test_a_trainers_newest_checkpoint_is_found_below_its_root(writer, tmp_path):
    writer.run(write_trainer, tmp_path)
    found = distft.adopt(tmp_path)
    assert found.path == tmp_path / "checkpoint-2"
    assert (found.kind, found.step, found.dtype) == ("a checkpoint of Trainer", 2, "float32")
    assert (found.strategy, found.world_size) == ("one process", 1)
    assert found.parts == {
        "weights": ["model.safetensors"],
        "optimizer": ["optimizer.pt"],
        "scheduler": ["scheduler.pt"],
        "random state": ["rng_state.pth"],
        "data position": ["trainer_state.json"],
    }
    assert found.missing == ()
    assert found.resumes
    assert f"strategy.load('{found.path}', model, optimizer)" in found.how


def start_from_adapter(path: Path) -> tuple[list[str], float]:
    """Do what the report of an adapter says."""
    distft.init()
    strategy = FSDP2()
    model = distft.load_adapter(tiny_model("L"), path)
    model, optimizer = strategy.apply(model, partial(torch.optim.AdamW, lr=1e-3))
    loss = strategy.train_step(model, optimizer, own_rows(0)).loss
    return [name for name, p in model.named_parameters() if p.requires_grad], loss


def test_a_state_of_accelerate_says_no_step(writer, tmp_path):
    writer.run(write_accelerate, tmp_path / "state")
    found = distft.adopt(tmp_path / "state")
    assert found.kind == "a state of Accelerate"
    assert (found.step, found.world_size, found.dtype) == (None, 1, "float32")
    assert list(found.parts) == ["weights", "optimizer", "scheduler", "random state"]
    assert found.missing == ("data position",)
    assert "not said by the folder" in str(found)
    assert found.resumes
    assert "strategy.load(" in found.how


def test_an_adapter_is_known_with_its_type_and_trained_on_here(writer, pools, tmp_path):
    writer.run(write_adapter, tmp_path)
    found = distft.adopt(tmp_path)
    assert found.kind.startswith("a LORA adapter of PEFT")
    assert found.parts == {"adapter": ["adapter_model.safetensors"]}
    assert found.missing == ("weights", "optimizer", *LOST)
    for trained, loss in pools(2).run(start_from_adapter, tmp_path):
        assert trained
        assert all("lora_" in name for name in trained)
        assert loss > 0


def test_a_model_says_its_dtype_and_which_shard_is_gone(writer, tmp_path):
    writer.run(write_model, tmp_path)
    whole = distft.adopt(tmp_path)
    assert (whole.kind, whole.dtype) == ("a llama model for from_pretrained", "bfloat16")
    gone = tmp_path / whole.parts["weights"][1]
    gone.unlink()
    assert gone.name in distft.adopt(tmp_path).missing


# ---- written by two ranks ----------------------------------------------------------------------


def deepspeed_run(stage: int, path: Path, bf16: bool = False) -> list[float]:
    """Train 2 steps with DeepSpeed's own engine, save, and return the losses of 2 more."""
    from distft.strategies._deepspeed import load_deepspeed

    distft.init()
    model = tiny_model("L")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, _, _, _ = load_deepspeed().initialize(
        model=model,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": bf16},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 2**62,
        },
    )
    losses = []
    for step in range(4):
        if step == 2:
            engine.save_checkpoint(str(path))
        loss = engine(**own_rows(step)[0]).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    return losses[2:]


def resume_here(strategy: Any, path: Path, out: Path | None = None) -> list[float]:
    distft.init()
    model, optimizer = strategy.apply(tiny_model("L", seed=9), partial(torch.optim.AdamW, lr=1e-3))
    step = strategy.load(path, model, optimizer).step
    assert step == 2
    if out is not None:
        strategy.save(out, model, optimizer, step=step)
        model, optimizer = strategy.apply(
            tiny_model("L", seed=8), partial(torch.optim.AdamW, lr=1e-3)
        )
        strategy.load(out, model, optimizer)
    return [strategy.train_step(model, optimizer, own_rows(s)).loss for s in (step, step + 1)]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_run_of_deepspeed_goes_on_here_with_the_next_losses_equal(pools, tmp_path, stage):
    losses = pools(2).run(deepspeed_run, stage, tmp_path / "run")[0]
    found = distft.adopt(tmp_path / "run")
    assert (found.stage, found.world_size, found.step) == (stage, 2, 2)
    assert found.strategy is not None
    assert found.strategy.startswith(f"ZeRO-{stage} of DeepSpeed")
    assert (found.dtype, list(found.missing), found.resumes) == ("float32", LOST, True)
    assert f"distft.ZeRO{stage}()  # on 2 ranks" in found.how
    assert distft.adopt(tmp_path / "run" / "global_step2").step == 2
    saved = tmp_path / "saved"
    for here in pools(2).run(resume_here, ZERO[stage](), tmp_path / "run", saved):
        assert here == pytest.approx(losses, rel=1e-6)


def test_a_bf16_run_of_deepspeed_goes_on_here(pools, tmp_path):
    losses = pools(2).run(deepspeed_run, 2, tmp_path, True)[0]
    assert 'precision="bf16-mixed"' in distft.adopt(tmp_path).how
    for here in pools(2).run(resume_here, ZeRO2(precision="bf16-mixed"), tmp_path):
        assert here == pytest.approx(losses, rel=5e-3)


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        (ZeRO1(), "saved by ZeRO-2 on 2 ranks, and this is ZeRO-1 on 2"),
        (FSDP2(), "saved by ZeRO-2 on 2 ranks, and this is FSDP"),
        (ZeRO2(precision="bf16-mixed"), "bf16 off"),
    ],
)
def test_another_stage_strategy_or_precision_is_refused(pools, tmp_path, strategy, says):
    pools(2).run(deepspeed_run, 2, tmp_path)
    with pytest.raises(RanksFailed, match=says):
        pools(2).run(resume_here, strategy, tmp_path)


def test_a_deepspeed_folder_without_one_ranks_file_does_not_resume(pools, tmp_path):
    pools(2).run(deepspeed_run, 2, tmp_path)
    next(tmp_path.rglob("*rank_1*optim_states.pt")).unlink()
    found = distft.adopt(tmp_path)
    assert not found.resumes
    assert "1 of 2 files global_step2/*_optim_states.pt" in found.missing


def write_dcp(path: Path) -> None:
    """Save as torchtitan does: states by their names, one folder a step."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    distft.init()
    model = tiny_model("L")
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(**own_rows(0)[0]).loss.backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    state = {**weights, "optimizer": moments, "train_state": {"step": torch.tensor(7)}}
    dcp.save({**state, "lr_scheduler": {"last_epoch": 7}}, checkpoint_id=path)


def test_a_distributed_checkpoint_of_torch_is_known_by_its_names(pools, tmp_path):
    pools(2).run(write_dcp, tmp_path / "step-7")
    found = distft.adopt(tmp_path)
    assert found.path == tmp_path / "step-7"
    assert found.kind == "a distributed checkpoint of torch, by torchtitan"
    assert (found.step, found.dtype, found.resumes) == (7, "float32", True)
    assert set(found.parts) == {"weights", "optimizer", "scheduler"}
    assert found.missing == ("random state", "data position")
    gone = next((tmp_path / "step-7").glob("*.distcp"))
    gone.unlink()
    assert gone.name in distft.adopt(tmp_path).missing


def save_own(path: Path) -> None:
    strategy = FSDP2()
    distft.init()
    model, optimizer = strategy.apply(tiny_model("L"), partial(torch.optim.AdamW, lr=1e-3))
    strategy.train_step(model, optimizer, own_rows(0))
    strategy.save(path / "step-1", model, optimizer, step=1)


def test_a_checkpoint_of_distft_is_named_with_the_call_that_loads_it(pools, tmp_path):
    pools(2).run(save_own, tmp_path)
    found = distft.adopt(tmp_path)
    assert (found.kind, found.strategy) == ("a checkpoint of distft", "FSDP2()")
    assert (found.step, found.world_size, found.resumes) == (1, 2, True)
    assert list(found.missing) == ["scheduler", "data position"]
    assert "strategy.load(" in found.how


def load_here(path: Path) -> None:
    distft.init()
    strategy = FSDP2()
    model, optimizer = strategy.apply(tiny_model("L"), partial(torch.optim.AdamW, lr=1e-3))
    strategy.load(path, model, optimizer)


def test_a_folder_without_an_optimizer_is_refused_with_what_to_do(writer, pools, tmp_path):
    writer.run(write_model, tmp_path)
    with pytest.raises(RanksFailed, match=r"optimizer is missing(?s:.)*load_model"):
        pools(2).run(load_here, tmp_path)


def test_a_folder_that_would_run_code_is_refused(pools, tmp_path):
    pools(2).run(deepspeed_run, 2, tmp_path)
    [states] = tmp_path.rglob("*_model_states.pt")
    torch.save({"module": partial(print, "gotcha")}, states)
    with pytest.raises(ValueError, match=r"functools\.partial.*Nothing was loaded"):
        distft.adopt(tmp_path)
    shutil.rmtree(tmp_path / "global_step2")


def test_a_trainers_checkpoint_with_deepspeed_files_in_it_names_stage_and_ranks(
    writer, pools, tmp_path
):
    # As Trainer has it: the engine's files and its tag inside the checkpoint folder.
    writer.run(write_trainer, tmp_path)
    checkpoint = tmp_path / "checkpoint-2"
    for name in ("model.safetensors", "optimizer.pt", "rng_state.pth"):
        (checkpoint / name).unlink()
    pools(2).run(deepspeed_run, 2, checkpoint)
    found = distft.adopt(tmp_path)
    assert found.kind == "a checkpoint of Trainer, with DeepSpeed"
    assert (found.stage, found.world_size, found.step) == (2, 2, 2)
    assert found.resumes
    assert found.missing == ("random state",)
