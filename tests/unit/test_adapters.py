"""Adapters that PEFT wrote, merged into a base and written again: no ranks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from distft.checkpoint.adapters import peft_name
from distft.checkpoint.consolidation import consolidate
from distft.testing import tiny_model
from tests.gloo.lora_jobs import EXPERTS, fix_values, logits_of
from tests.zero_folder import write_zero

pytestmark = pytest.mark.filterwarnings(
    # PEFT reads a property by a name that transformers has renamed, and warns of what is tested.
    "ignore:`is_gradient_checkpointing` is deprecated",
    "ignore:Setting `save_embedding_layers`",
    "ignore:Could not find a config file",
    "ignore:Model with `tie_word_embeddings",
    "ignore:.*tied",
    "ignore:Adapter 'default'. 2 LoRA tensor.s. have invalid shape",
    "ignore:The following rank_pattern keys did not match",
    "ignore:The following alpha_pattern keys did not match",
)
FILE, ADAPTER_FILE = "model.safetensors", "adapter/adapter_model.safetensors"
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


def gpt2():
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64, "vocab_size": 131}
    config = AutoConfig.for_model("gpt2", **sizes, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)
    return AutoModelForCausalLM.from_config(config)


BASES = {
    "gpt2": gpt2,
    "biased": lambda: tiny_model("L", attention_bias=True),
    # As in GPT-OSS itself, fused experts are as wide as the model, and shapes do not tell them.
    "square": lambda: tiny_model("G", intermediate_size=32),
}
MERGES = {
    "linear": ("L", {"target_modules": "all-linear", "r": 2, "lora_alpha": 7}),
    "patterns": (
        "Q",
        {
            "target_modules": ["q_proj", "o_proj", "down_proj"],
            "r": 4,
            "use_rslora": True,
            "rank_pattern": {"layers.1.mlp.down_proj": 2, "o_proj": 3},
            "alpha_pattern": {"q_proj": 5},
        },
    ),
    "bias": ("biased", {"target_modules": ["q_proj"], "lora_bias": True}),
    "all biases": ("biased", {"target_modules": ["q_proj"], "bias": "all"}),
    "embeddings": ("L", {"target_modules": ["embed_tokens", "lm_head"]}),
    "whole modules": ("L", {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "experts": ("M", {"target_parameters": EXPERTS, "target_modules": []}),
    "other order": (
        "M",
        {"target_parameters": EXPERTS[::-1], "target_modules": ["q_proj"], "r": 3},
    ),
    "ranks of experts": (
        "M",
        {
            "target_parameters": EXPERTS,
            "target_modules": [],
            "rank_pattern": {"experts.down_proj": 2},
        },
    ),
    # PEFT makes parameters of what were layers, the router too, with ranks and scales of their own.
    "all of a moe": ("M", {"target_modules": "all-linear"}),
    "mixtral": ("X", {"target_parameters": EXPERTS, "target_modules": ["q_proj"]}),
    "gpt-oss": ("G", {"target_parameters": EXPERTS, "target_modules": ["q_proj"]}),
    "square experts": ("square", {"target_parameters": EXPERTS, "target_modules": []}),
    # Not W + scale * B A: PEFT merges it, with the model whole.
    "dora": ("L", {"target_modules": ["q_proj"], "use_dora": True}),
}


def made(folder: Path, name: str, changes: dict) -> torch.nn.Module:
    """Write a base and an adapter with values of its own; return the PEFT model."""
    base = BASES.get(name, lambda: tiny_model(name))()
    base.save_pretrained(folder / "base")
    model = fix_values(get_peft_model(base, LoraConfig(**{"r": 4, "lora_alpha": 8, **changes})))
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(0.01)
    model.save_pretrained(str(folder / "adapter"))
    return model.eval()


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def load_clean(folder: Path) -> torch.nn.Module:
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()


@pytest.mark.parametrize("case", MERGES)
def test_a_merge_is_what_peft_makes_of_it(tmp_path, case):
    model = made(tmp_path, *MERGES[case])
    live = logits_of(model)
    out = consolidate(
        tmp_path / "adapter", tmp_path / "out", adapter="merge", base=tmp_path / "base"
    )
    merged = load_clean(out)
    torch.testing.assert_close(logits_of(merged), live, rtol=0, atol=1e-5)
    expected, found = state(model.merge_and_unload()), state(merged)
    assert set(found) == set(expected)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=1e-6, msg=name)
    start = load_file(next((tmp_path / "base").glob("*.safetensors")))
    same = {n for n, w in load_file(out / "model.safetensors").items() if torch.equal(w, start[n])}
    assert 0 < len(same) < len(start)
    assert not (out / "adapter").exists()


def test_of_tied_embeddings_the_adapter_changes_one_and_the_other_is_written_too(tmp_path):
    # PEFT adds in place, and so to the head as well; the model in training does not.
    model = made(tmp_path, "Lt", {"target_modules": ["embed_tokens"]})
    live = logits_of(model)
    out = consolidate(
        tmp_path / "adapter", tmp_path / "out", adapter="merge", base=tmp_path / "base"
    )
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    torch.testing.assert_close(logits_of(load_clean(out)), live, rtol=0, atol=1e-5)


def test_a_merge_in_16_bits_is_rounded_once(tmp_path):
    made(tmp_path, "L", {"target_modules": "all-linear"})
    whole = {"adapter": "merge", "base": tmp_path / "base"}
    exact = load_file(consolidate(tmp_path / "adapter", tmp_path / "32", **whole) / FILE)
    found = consolidate(tmp_path / "adapter", tmp_path / "16", dtype="bfloat16", **whole)
    for name, weight in load_file(found / FILE).items():
        assert torch.equal(weight, exact[name].bfloat16()), name
    assert json.loads((found / "config.json").read_text())["dtype"] == "bfloat16"


def test_what_is_merged_has_the_dtype_of_the_base_and_names_it(tmp_path):
    made(tmp_path, "L", {"target_modules": ["v_proj"], "modules_to_save": ["norm"]})
    half = consolidate(tmp_path / "base", tmp_path / "half", dtype="bfloat16")
    out = consolidate(tmp_path / "adapter", tmp_path / "out", adapter="merge", base=half)
    assert {weight.dtype for weight in load_file(out / FILE).values()} == {torch.bfloat16}
    with safe_open(out / FILE, "pt") as file:
        assert file.metadata() == {"format": "pt", "base_model": str(half)}


def test_merging_needs_no_torch_and_no_more_memory_than_it_says(tmp_path):
    made(tmp_path, "M", {"target_parameters": EXPERTS, "target_modules": ["q_proj"]})
    code = (
        "import sys, distft; path, out, base = sys.argv[1:];"
        "distft.consolidate(path, out, adapter='merge', base=base, max_ram='20MB');"
        "print(sorted({'torch', 'transformers', 'safetensors', 'peft'} & set(sys.modules)))"
    )
    paths = [tmp_path / "adapter", tmp_path / "out", tmp_path / "base"]
    command = [sys.executable, "-W", "error", "-c", code, *paths]
    done = subprocess.run(command, check=True, timeout=600, capture_output=True, text=True)
    assert done.stdout == "[]\n"
    with pytest.raises(ValueError, match=r"max_ram is 5000000 bytes, and merging takes \d+"):
        consolidate(paths[0], tmp_path / "no", adapter="merge", base=paths[2], max_ram="5MB")
    assert not (tmp_path / "no").exists()


def test_rows_of_a_tensor_larger_than_a_buffer_are_added_to_as_well(tmp_path, monkeypatch):
    made(tmp_path, "M", {"target_parameters": EXPERTS, "target_modules": "all-linear"})
    whole = {"adapter": "merge", "base": tmp_path / "base"}
    expected = load_file(consolidate(tmp_path / "adapter", tmp_path / "one", **whole) / FILE)
    monkeypatch.setattr("distft.checkpoint.merging.BUFFER_BYTES", 8 * 100)
    found = load_file(consolidate(tmp_path / "adapter", tmp_path / "many", **whole) / FILE)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=1e-7)


# ---- keep and only ------------------------------------------------------------------------------


def test_an_adapter_alone_is_written_as_it_was_and_with_a_base_beside_it(tmp_path):
    model = made(tmp_path, "L", {"target_modules": "all-linear"})
    live = logits_of(model)
    out = consolidate(tmp_path / "adapter", tmp_path / "only", adapter="only")
    before = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    after = load_file(out / "adapter_model.safetensors")
    assert set(after) == set(before)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    both = consolidate(tmp_path / "adapter", tmp_path / "both", base=tmp_path / "base")
    loaded = PeftModel.from_pretrained(load_clean(both), str(both / "adapter")).eval()
    torch.testing.assert_close(logits_of(loaded), live, rtol=0, atol=1e-6)
    half = consolidate(tmp_path / "adapter", tmp_path / "half", adapter="only", dtype="bfloat16")
    found = load_file(half / "adapter_model.safetensors")
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in before.items())


def test_an_adapter_that_is_a_pickle_becomes_safetensors(tmp_path):
    made(tmp_path, "L", {"target_modules": ["q_proj"]})
    before = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    old = tmp_path / "old"
    old.mkdir()
    torch.save(before, old / "adapter_model.bin")
    shutil.copy(tmp_path / "adapter" / "adapter_config.json", old)
    out = consolidate(old, tmp_path / "out", adapter="only")
    after = load_file(out / "adapter_model.safetensors")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    loaded = PeftModel.from_pretrained(tiny_model("L"), str(out))
    assert "q_proj.lora_A" in " ".join(loaded.state_dict())


def test_names_in_training_become_those_of_peffts_file():
    assert peft_name(f"{LAYER}.base_layer.lora_B.default.weight") == (
        f"{LAYER}.base_layer.lora_B.weight"
    )
    assert peft_name(f"{LAYER}.lora_magnitude_vector.default.weight") == (
        f"{LAYER}.lora_magnitude_vector"
    )
    embedding = "base_model.model.model.embed_tokens.lora_embedding_A"
    assert peft_name(f"{embedding}.default") == embedding


# ---- what is refused ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Return a folder with a base and an adapter on it."""
    folder = tmp_path_factory.mktemp("plain")
    made(folder, "L", {"target_modules": ["q_proj"]})
    return folder


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, r"holds an adapter of 4 tensors and 0 of its base.*Pass base="),
        ({"adapter": "merge"}, r"holds an adapter of 4 tensors and 0 of its base"),
        ({"adapter": "only", "base": "base"}, r"names a base, and the adapter alone was asked for"),
        ({"adapter": "both"}, r"is none of the 3 choices keep, merge, only"),
    ],
)
def test_a_choice_that_an_adapter_does_not_allow_is_refused(plain, tmp_path, options, says):
    if "base" in options:
        options = {**options, "base": plain / "base"}
    with pytest.raises(ValueError, match=says):
        consolidate(plain / "adapter", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_a_base_for_a_model_without_an_adapter_is_refused(plain, tmp_path):
    with pytest.raises(ValueError, match=r"base=.* was asked for, and .*base holds 0 adapters"):
        consolidate(plain / "base", tmp_path / "out", base=plain / "base")


def test_a_base_of_another_shape_is_refused_with_both(plain, tmp_path):
    tiny_model("L", hidden_size=48).save_pretrained(tmp_path / "wide")
    says = r"changes model\.layers\.0\.self_attn\.q_proj\.weight of shape \[32, 32\].*\[48, 48\]"
    with pytest.raises(ValueError, match=says):
        consolidate(plain / "adapter", tmp_path / "out", adapter="merge", base=tmp_path / "wide")
    assert not (tmp_path / "out").exists()


def quantize(folder: Path, source: Path, in_config: bool) -> Path:
    """Write a model as bitsandbytes packs it, with the config that says so or without."""
    folder.mkdir()
    tensors = load_file(source / FILE)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = torch.zeros(512, 1, dtype=torch.uint8)
    if not in_config:
        tensors[f"{name}.quant_state.bitsandbytes__nf4"] = torch.zeros(8, dtype=torch.uint8)
    save_file(tensors, folder / FILE, {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    if in_config:
        config["quantization_config"] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("in_config", [True, False])
def test_a_quantized_base_is_not_merged_into(plain, tmp_path, in_config):
    packed = quantize(tmp_path / "packed", plain / "base", in_config)
    kind = "nf4" if in_config else "bitsandbytes"
    with pytest.raises(ValueError, match=rf"is quantized \({kind}\). Pass base=.*16 or 32 bits"):
        consolidate(plain / "adapter", tmp_path / "out", adapter="merge", base=packed)
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_another_type_is_refused_by_its_name(plain, tmp_path):
    config = json.loads((plain / "adapter" / "adapter_config.json").read_text())
    other = consolidate(plain / "adapter", tmp_path / "other", adapter="only")
    (other / "adapter_config.json").write_text(json.dumps({**config, "peft_type": "IA3"}))
    with pytest.raises(ValueError, match=r"type LORA into their base, and .* type IA3"):
        consolidate(other, tmp_path / "out", adapter="merge", base=plain / "base")


def test_a_rank_that_the_config_does_not_say_is_refused_with_both(plain, tmp_path):
    config = json.loads((plain / "adapter" / "adapter_config.json").read_text())
    other = consolidate(plain / "adapter", tmp_path / "other", adapter="only")
    (other / "adapter_config.json").write_text(json.dumps({**config, "r": 16}))
    with pytest.raises(ValueError, match=r"has rank 4 at .*q_proj, and its config says 16"):
        consolidate(other, tmp_path / "out", adapter="merge", base=plain / "base")


def test_an_adapter_without_its_config_is_refused(plain, tmp_path):
    other = consolidate(plain / "adapter", tmp_path / "other", adapter="only")
    (other / "adapter_config.json").unlink()
    with pytest.raises(ValueError, match=r"has the adapter_config\.json that says how they are"):
        consolidate(other, tmp_path / "out", adapter="merge", base=plain / "base")


# ---- runs of other tools, whose files hold adapter and base under one another's names -----------


def write_run(folder: Path, kind: str, model: torch.nn.Module) -> None:
    """Write a LoRA run as DeepSpeed, or as torch's distributed checkpoint, lays it out."""
    if kind == "dcp":
        weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp.save(weights, checkpoint_id=folder, no_dist=True)
        return
    named = {name: p.detach() for name, p in model.named_parameters()}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    groups = [{name: named[name] for name in named if name in trained}]
    rest = {name: weight for name, weight in named.items() if name not in trained}
    write_zero(folder / "global_step3", int(kind[-1]), 3, groups, frozen=rest)
    (folder / "latest").write_text("global_step3")


@pytest.mark.parametrize("kind", ["zero-1", "zero-2", "zero-3", "dcp"])
def test_an_adapter_among_the_files_of_a_run_is_found_kept_and_merged(tmp_path, kind):
    lora = {
        "target_modules": "all-linear",
        "modules_to_save": ["norm"],
        "rank_pattern": {"q_proj": 2},
    }
    model = made(tmp_path, "L", lora)
    live, run = logits_of(model), tmp_path / "run"
    write_run(run, kind, model)
    base = {"config": tmp_path / "base"}
    with pytest.raises(ValueError, match=r"adapter_config\.json that says .* Copy it there"):
        consolidate(run, tmp_path / "none", adapter="only")
    shutil.copy(tmp_path / "adapter" / "adapter_config.json", run)

    only = consolidate(run, tmp_path / "only", adapter="only")
    expected = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    found = load_file(only / "adapter_model.safetensors")
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert load_file(consolidate(run, tmp_path / "left", exclude_frozen=True) / ADAPTER_FILE)

    keep = consolidate(run, tmp_path / "keep", **base)
    start = load_file(tmp_path / "base" / FILE)
    found = load_file(keep / FILE)
    assert set(found) == set(start)
    assert all(torch.equal(found[name], tensor) for name, tensor in start.items())
    loaded = PeftModel.from_pretrained(load_clean(keep), str(keep / "adapter")).eval()
    torch.testing.assert_close(logits_of(loaded), live, rtol=0, atol=1e-6)

    merged = consolidate(run, tmp_path / "merged", adapter="merge", **base)
    torch.testing.assert_close(logits_of(load_clean(merged)), live, rtol=0, atol=1e-5)


def test_an_adapter_on_a_resized_vocabulary_is_merged_with_its_rows(tmp_path):
    # Case ADPT-04
    tiny_model("L").save_pretrained(tmp_path / "base")
    base = tiny_model("L")
    base.resize_token_embeddings(137, mean_resizing=False)
    lora = LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    model = fix_values(get_peft_model(base, lora)).eval()
    model.save_pretrained(str(tmp_path / "adapter"))
    out = consolidate(
        tmp_path / "adapter", tmp_path / "out", adapter="merge", base=tmp_path / "base"
    )
    merged = load_clean(out)
    assert merged.config.vocab_size == 137
    torch.testing.assert_close(logits_of(merged), logits_of(model), rtol=0, atol=1e-5)
