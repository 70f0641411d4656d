"""Loading a folder: each rank its part, the values those of from_pretrained, training the same."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.optim import AdamW

import distft
import distft.training.loss
from distft import DDP, FSDP2, HSDP, ZeRO1, ZeRO2, ZeRO3
from distft.checkpoint.pretrained import _progress_bar
from distft.checkpoint.safetensors_reader import INDEX, SINGLE
from distft.testing import tiny_batches, tiny_model
from distft.testing.runs import Training, differences, train_alone, train_under

SIX = [DDP(), ZeRO1(), ZeRO2(), ZeRO3(), FSDP2(), HSDP(dp_replicate=1)]
WORLDS = [(s, n) for n in (1, 2, 3, 4) for s in SIX] + [(HSDP(dp_replicate=2), 4)]
IDS = [f"{strategy}@{ranks}" for strategy, ranks in WORLDS]
MODELS = ("L", "Lt", "Q", "M")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One folder for each tiny model; M's is in several files with an index."""
    root = tmp_path_factory.mktemp("models")
    for name in MODELS:
        size = "60KB" if name == "M" else "5GB"
        tiny_model(name).save_pretrained(root / name, max_shard_size=size)
    assert len(list((root / "M").glob("*.safetensors"))) > 1
    return root


def whole_tensors(model):
    """Return every parameter whole and every buffer, by name; a collective."""
    from torch.distributed.tensor import DTensor

    found = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            found[name] = parameter.full_tensor().detach().clone()
        elif hasattr(parameter, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                found[name] = parameter.detach().clone()
        else:
            found[name] = parameter.detach().clone()
    return found, {name: buffer.clone() for name, buffer in model.named_buffers()}


def published(folder, dtype=torch.float32, model_class=transformers.AutoModelForCausalLM):
    return model_class.from_pretrained(folder, dtype=dtype)


def assert_equal(found, expected, what):
    assert set(found) == set(expected), what
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, f"{what}: {name}"
        assert torch.equal(found[name], tensor), f"{what}: {name}"


def job_values(strategy, folders, names, dtype):
    distft.init()
    answers = {}
    for name in names:
        model = distft.load_model(folders / name, strategy, dtype)
        answers[name] = (*whole_tensors(model), model.training, type(model.config).__name__)
    return answers


@pytest.mark.parametrize(("strategy", "ranks"), WORLDS, ids=IDS)
def test_every_rank_has_the_values_of_from_pretrained(pools, folders, strategy, ranks):
    for rank, answers in enumerate(pools(ranks).run(job_values, strategy, folders, MODELS, None)):
        for name in MODELS:
            expected = published(folders / name)
            parameters, buffers, training, config = answers[name]
            assert_equal(parameters, dict(expected.named_parameters()), f"{name} on rank {rank}")
            assert_equal(buffers, dict(expected.named_buffers()), f"{name} on rank {rank}")
            assert training
            assert config == type(expected.config).__name__


@dataclass(frozen=True)
class FromFolder(Training):
    """A training that starts from a folder; alone where there is no strategy."""

    folder: Path = Path()
    strategy: distft.Strategy | None = None

    def build(self):
        path = self.folder / self.model
        return distft.load_model(path, self.strategy) if self.strategy else published(path)


@cache
def reference(folder, name, num_micro_batches):
    return train_alone(FromFolder(name, 3, num_micro_batches, 0.1, folder=folder))


def job_train(strategy, folder, name, num_micro_batches):
    training = FromFolder(name, 3, num_micro_batches, 0.1, folder=folder, strategy=strategy)
    return train_under(strategy, training)


TRAINED = [*[(s, 3, n) for s in SIX for n in ("Lt", "M")], (HSDP(dp_replicate=2), 4, "Q")]
TRAINED += [(ZeRO3(), 2, "L"), (FSDP2(), 4, "M"), (FSDP2(), 1, "Q"), (ZeRO3(), 1, "Q")]


@pytest.mark.parametrize(("strategy", "ranks", "name"), TRAINED, ids=str)
def test_three_steps_from_a_folder_equal_one_process(pools, folders, strategy, ranks, name):
    batches = 2 * ranks
    expected = reference(folders, name, batches)
    for rank, found in enumerate(pools(ranks).run(job_train, strategy, folders, name, batches)):
        assert differences(found, expected) == [], f"rank {rank}"


def job_compare(strategy, folder):
    loaded = job_train(strategy, folder, "Q", 4)
    applied = train_under(strategy, WholeFirst("Q", 3, 4, 0.1, folder=folder))
    return loaded, applied


class WholeFirst(FromFolder):
    """The same training from a model that from_pretrained read."""


MIXED = [kind(precision=p) for kind in (FSDP2, ZeRO3, DDP) for p in ("bf16-mixed", "bf16")]


@pytest.mark.parametrize("strategy", MIXED, ids=str)
def test_a_loaded_model_trains_as_one_that_apply_splits(pools, folders, strategy):
    for loaded, applied in pools(2).run(job_compare, strategy, folders):
        assert loaded.losses == applied.losses
        assert loaded.norms == applied.norms
        assert_equal(loaded.weights, applied.weights, str(strategy))


# ---- what is read ---------------------------------------------------------------------------


def job_bytes(strategy, folder):
    distft.init()
    read, preadv = [], os.preadv

    def counted(descriptor, buffers, offset):
        got = preadv(descriptor, buffers, offset)
        read.append(got)
        return got

    os.preadv = counted
    try:
        model = distft.load_model(folder, strategy)
    finally:
        os.preadv = preadv
    held = sum(p.to_local().numel() * p.element_size() for p in model.parameters())
    return sum(read), held


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("strategy", "ranks"), [(FSDP2(), 4), (HSDP(dp_replicate=2), 4)], ids=str)
def test_a_rank_reads_the_bytes_that_it_holds_and_no_others(pools, folders, strategy, ranks, name):
    answers = pools(ranks).run(job_bytes, strategy, folders / name)
    assert all(read == held for read, held in answers), answers
    replicas = 2 if isinstance(strategy, HSDP) else 1
    whole = sum(p.numel() * 4 for p in tiny_model(name).parameters())
    assert sum(read for read, _ in answers) == replicas * whole


def test_a_dtype_is_cast_while_it_is_read(pools, folders):
    for strategy in (DDP(), ZeRO3(), FSDP2()):
        for answers in pools(2).run(job_values, strategy, folders, ["Q"], "bfloat16"):
            parameters, buffers, *_ = answers["Q"]
            expected = published(folders / "Q", torch.bfloat16)
            assert_equal(parameters, dict(expected.named_parameters()), str(strategy))
            assert_equal(buffers, dict(expected.named_buffers()), str(strategy))


def mixtral():
    config = transformers.MixtralConfig(
        vocab_size=131,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=3,
        max_position_embeddings=64,
    )
    return transformers.MixtralForCausalLM(config)


@pytest.mark.parametrize("strategy", [FSDP2(), ZeRO3()], ids=str)
def test_experts_of_mixtral_come_from_their_published_names(pools, tmp_path, strategy):
    mixtral().save_pretrained(tmp_path / "X")
    assert any("block_sparse_moe.experts.0.w1" in n for n in load_file(tmp_path / "X" / SINGLE))
    expected = published(tmp_path / "X")
    for answers in pools(2).run(job_values, strategy, tmp_path, ["X"], None):
        assert_equal(answers["X"][0], dict(expected.named_parameters()), str(strategy))


def job_log(strategy, folder):
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("distft").addHandler(handler)
    try:
        distft.init()
        model = distft.load_model(folder, strategy)
    finally:
        logging.getLogger("distft").removeHandler(handler)
    return whole_tensors(model), records


@pytest.mark.parametrize("strategy", [FSDP2(), ZeRO3()], ids=str)
def test_a_conversion_unknown_here_is_read_whole_and_said_in_the_log(pools, tmp_path, strategy):
    config = transformers.GraniteMoeConfig(
        vocab_size=131,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=3,
    )
    transformers.GraniteMoeForCausalLM(config).save_pretrained(tmp_path)
    expected = published(tmp_path)
    answers = pools(2).run(job_log, strategy, tmp_path)
    assert [len(records) for _, records in answers] == [1, 0]
    assert "unknown here, so each rank reads the whole model" in answers[0][1][0]
    for (parameters, buffers), _ in answers:
        assert_equal(parameters, dict(expected.named_parameters()), "granite")
        assert_equal(buffers, dict(expected.named_buffers()), "granite")


def test_names_from_before_a_rename_are_read_whole(pools, folders, tmp_path):
    bert = transformers.BertConfig(
        vocab_size=131,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    model = transformers.BertForSequenceClassification(bert)
    model.save_pretrained(tmp_path)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma"): tensor
        for name, tensor in load_file(tmp_path / SINGLE).items()
    }
    save_file(old, tmp_path / SINGLE, metadata={"format": "pt"})
    for (parameters, buffers), _ in pools(2).run(job_log, FSDP2(), tmp_path):
        assert_equal(parameters, dict(model.named_parameters()), "bert")
        assert_equal(buffers, dict(model.named_buffers()), "bert")


# ---- cases ----------------------------------------------------------------------------------


def job_tied(folder):
    distft.init()
    strategy = FSDP2()
    model = distft.load_model(folder, strategy)
    model, _ = strategy.apply(model, partial(AdamW, lr=1e-3))
    batch = tiny_batches([15])[0]
    strategy.backward(distft.training.loss.next_token_loss(model, batch) / 30)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    gradients = strategy.gather_gradients(model)
    return tied, len(list(model.parameters())), gradients["model.embed_tokens.weight"]


def test_case_5_a_tied_embedding_gets_both_halves_of_its_gradient(pools, folders):
    model, batch = published(folders / "Lt"), tiny_batches([15])[0]
    (distft.training.loss.next_token_loss(model, batch) / 15).backward()
    expected = model.model.embed_tokens.weight.grad
    absent = sorted(set(range(131)) - set(batch["input_ids"].flatten().tolist()))
    for tied, count, gradient in pools(2).run(job_tied, folders / "Lt"):
        assert tied
        assert count == 20
        assert (gradient - expected).norm() / expected.norm() <= 1e-5
        assert gradient[absent].abs().amax(dim=1).min() > 0


def job_dirty_memory(strategy, folder):
    distft.init()
    dirt = [torch.full((size,), float("nan")) for size in (4, 8, 16, 64, 512, 4096) * 50]
    del dirt
    model = distft.load_model(folder, strategy)
    model, _ = strategy.apply(model, partial(AdamW, lr=1e-3))
    with torch.no_grad():
        logits = model(**tiny_batches([5])[0]).logits
    return {name: buffer.clone() for name, buffer in model.named_buffers()}, logits.clone()


@pytest.mark.parametrize(
    "strategy", [FSDP2(precision="bf16"), HSDP(dp_replicate=2, precision="bf16")], ids=str
)
def test_case_14_frequencies_are_those_of_a_cpu_build_on_every_rank(pools, folders, strategy):
    model = published(folders / "Q", torch.bfloat16)
    with torch.no_grad():
        expected = model(**tiny_batches([5])[0]).logits
    built = dict(tiny_model("Q").named_buffers())
    assert {"model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"} <= set(built)
    for buffers, logits in pools(4).run(job_dirty_memory, strategy, folders / "Q"):
        assert all(buffer.dtype == torch.float32 for buffer in buffers.values())
        assert_equal(buffers, built, str(strategy))
        assert torch.equal(logits, expected)


class LlamaWithBuffer(transformers.LlamaForCausalLM):
    """A Llama with a buffer that its checkpoints hold."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("scale", torch.zeros(3))


def job_persistent(strategy, folder, out):
    distft.init()
    model = distft.load_model(folder, strategy, model_class=LlamaWithBuffer)
    model, optimizer = strategy.apply(model, partial(AdamW, lr=1e-3))
    strategy.save(out, model, optimizer, step=0)
    strategy.consolidate(out, f"{out}-whole")
    return distft.unwrap(model).scale.clone()


@pytest.mark.parametrize("strategy", [FSDP2(), ZeRO3(), DDP()], ids=str)
def test_case_15_a_persistent_buffer_is_read_on_every_rank_and_published(pools, tmp_path, strategy):
    model = LlamaWithBuffer(tiny_model("L").config)
    model.scale.copy_(torch.tensor([1.0, 2.0, 3.0]))
    model.save_pretrained(tmp_path / "model")
    found = pools(2).run(job_persistent, strategy, tmp_path / "model", str(tmp_path / "saved"))
    assert all(torch.equal(scale, model.scale) for scale in found)
    assert torch.equal(load_file(tmp_path / "saved-whole" / SINGLE)["scale"], model.scale)


# ---- wrong calls ----------------------------------------------------------------------------


def job_error(strategy, folder, keywords):
    distft.init()
    try:
        distft.load_model(folder, strategy, **keywords)
    except (ValueError, RuntimeError) as error:
        return type(error).__name__, str(error), 0
    return "nothing", "", 0


def assert_refused(answers, *parts):
    for rank, (kind, text, _) in enumerate(answers):
        assert kind == "ValueError", f"rank {rank}: {kind}: {text}"
        for part in parts:
            assert part in text, f"rank {rank}: {part!r} is not in {text!r}"
    assert len({text for _, text, _ in answers}) == 1, "the same on every rank"


def edited(folder, copy, change):
    shutil.copytree(folder, copy)
    tensors = load_file(copy / SINGLE)
    change(tensors)
    save_file(tensors, copy / SINGLE, metadata={"format": "pt"})
    return copy


@pytest.mark.parametrize("strategy", [DDP(), ZeRO3(), FSDP2()], ids=str)
def test_missing_extra_and_mismatched_tensors_are_named_with_shapes(
    pools, folders, tmp_path, strategy
):
    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.norm.weight"] = torch.zeros(33)
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(48, 32)

    folder = edited(folders / "L", tmp_path / "L", change)
    assert_refused(
        pools(2).run(job_error, strategy, folder, {}),
        "1 missing: model.layers.1.mlp.up_proj.weight (48, 32)",
        "1 extra: model.layers.7.mlp.up_proj.weight (48, 32)",
        "1 of another shape: model.norm.weight (33,) where the model has (32,)",
    )


def test_a_missing_expert_is_named_as_it_is_published(pools, folders, tmp_path):
    shutil.copytree(folders / "M", tmp_path / "M")
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    index = json.loads((tmp_path / "M" / INDEX).read_text())
    file = tmp_path / "M" / index["weight_map"].pop(name)
    save_file({n: t for n, t in load_file(file).items() if n != name}, file)
    (tmp_path / "M" / INDEX).write_text(json.dumps(index))
    assert_refused(
        pools(2).run(job_error, FSDP2(), tmp_path / "M", {}), f"1 missing: {name} (32, 16)"
    )


def test_another_architecture_than_asked_names_both(pools, folders):
    keywords = {"model_class": transformers.Qwen3ForCausalLM}
    answers = pools(2).run(job_error, FSDP2(), folders / "L", keywords)
    assert_refused(answers, "holds a LlamaForCausalLM", "asked for a Qwen3ForCausalLM")


def test_an_architecture_that_transformers_lacks_is_named(pools, folders, tmp_path):
    shutil.copytree(folders / "L", tmp_path / "L")
    config = json.loads((tmp_path / "L" / "config.json").read_text())
    config["architectures"] = ["OurOwnModel"]
    (tmp_path / "L" / "config.json").write_text(json.dumps(config))
    assert_refused(pools(2).run(job_error, FSDP2(), tmp_path / "L", {}), "names OurOwnModel")


def test_a_config_of_other_sizes_names_the_first_tensors_and_counts_the_rest(pools, folders):
    config = tiny_model("L", hidden_size=64).config
    answers = pools(2).run(job_error, FSDP2(), folders / "L", {"config": config})
    assert_refused(answers, "of another shape: model.embed_tokens.weight (131, 32)", "(131, 64)")
    assert_refused(answers, "and 17 more")


def test_a_config_of_another_architecture_names_both_kinds(pools, folders):
    answers = pools(2).run(job_error, FSDP2(), folders / "L", {"config": tiny_model("Q").config})
    assert_refused(answers, "holds a LlamaForCausalLM", "LlamaConfig", "got a Qwen3Config")


def test_a_file_that_is_cut_short_is_found_before_anything_is_read(pools, folders, tmp_path):
    shutil.copytree(folders / "L", tmp_path / "L")
    file = tmp_path / "L" / SINGLE
    os.truncate(file, file.stat().st_size - 1)
    size = file.stat().st_size
    assert_refused(
        pools(2).run(job_error, FSDP2(), tmp_path / "L", {}),
        f"{size} bytes",
        f"promises {size + 1}",
    )


@pytest.mark.parametrize(
    ("keywords", "part"),
    [
        (
            {"quantization_config": {"bits": 4}},
            "takes a transformers.BitsAndBytesConfig, and got a dict",
        ),
        ({"peft_config": {"r": 4}}, "takes a peft.LoraConfig"),
        ({"dtype": "int64"}, "dtype='int64'"),
    ],
)
def test_what_is_not_there_yet_is_refused(pools, folders, keywords, part):
    assert_refused(pools(2).run(job_error, FSDP2(), folders / "L", keywords), part)


def test_a_folder_without_a_model_and_a_name_as_strategy_are_refused(pools, tmp_path):
    assert_refused(pools(2).run(job_error, FSDP2(), tmp_path, {}), "holds no config.json")
    assert_refused(pools(2).run(job_error, "fsdp2", tmp_path, {}), "needs a strategy", "'fsdp2'")


def job_apply(loader, folder, strategy, dtype=None, twice=False, **keywords):
    distft.init()
    model = distft.load_model(folder, loader, dtype)
    try:
        for _ in range(1 + twice):
            strategy.apply(model, partial(AdamW, lr=1e-3), **keywords)
    except ValueError as error:
        return "ValueError", str(error), 0
    return "nothing", "", 0


@pytest.mark.parametrize(
    ("loader", "strategy"),
    [(FSDP2(), ZeRO3()), (ZeRO3(), FSDP2()), (DDP(), FSDP2()), (FSDP2(), FSDP2(defer_reduce=True))],
    ids=str,
)
def test_a_model_that_another_strategy_loaded_names_both(pools, folders, loader, strategy):
    answers = pools(2).run(job_apply, loader, folders / "L", strategy)
    assert_refused(answers, f"{strategy!r}.apply() got", f"spread for {loader!r}")


def test_a_loaded_model_is_applied_once(pools, folders):
    answers = pools(2).run(job_apply, FSDP2(), folders / "L", FSDP2(), None, True)
    assert_refused(answers, "distributed already by FSDP2()")


def test_a_dtype_in_which_the_strategy_does_not_train_is_refused_by_apply(pools, folders):
    answers = pools(2).run(job_apply, FSDP2(), folders / "L", FSDP2(), "bfloat16")
    assert_refused(answers, "trains weights in float32", "loaded in bfloat16")


def test_adapters_on_a_model_that_is_spread_already_are_refused(pools, folders):
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    for strategy in (FSDP2(), ZeRO3()):
        answers = pools(2).run(job_apply_adapters, strategy, folders / "L", config)
        assert_refused(answers, "got a peft_config", "load_model() has spread")


def job_apply_adapters(strategy, folder, config):
    return job_apply(strategy, folder, strategy, peft_config=config)


def shown(local_rank):
    """Return what a bar writes to a terminal."""
    ours, theirs = os.openpty()
    stderr, before = sys.stderr, os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = str(local_rank)
    sys.stderr = os.fdopen(theirs, "w")
    try:
        with _progress_bar(2) as advance:
            advance()
            advance()
        print("end", file=sys.stderr, flush=True)
        text = ""
        # A read returns what has come so far.
        while "end" not in text:
            text += os.read(ours, 65536).decode()
        return text
    finally:
        sys.stderr.close()
        sys.stderr = stderr
        os.close(ours)
        os.environ.pop("LOCAL_RANK") if before is None else None


def test_only_the_first_rank_of_a_machine_shows_a_bar_and_only_to_a_terminal(capsys):
    assert "Loading" in shown(0)
    assert "Loading" not in shown(1)
    with _progress_bar(1) as advance:
        advance()
    # What this process writes: ranks of other tests may still write into the same file.
    assert capsys.readouterr() == ("", "")
