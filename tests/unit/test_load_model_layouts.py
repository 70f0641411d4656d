"""Published layouts: the table here against what transformers publishes, and the file reader."""

from __future__ import annotations

import pytest
import torch
import transformers
from safetensors.torch import save_file

from distft.checkpoint.layouts import AS_IT_IS, MIXTRAL, PUBLISHED_AS, QWEN_MOE, layout_of
from distft.checkpoint.safetensors_reader import BUFFER_BYTES, Reader, list_tensors
from distft.checkpoint.skeleton import build
from distft.testing import tiny_model

SMALL = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 3,
}


@pytest.mark.parametrize(("name", "layout"), [("L", AS_IT_IS), ("Q", AS_IT_IS), ("M", QWEN_MOE)])
def test_the_layout_is_the_one_that_transformers_publishes(name, layout):
    assert layout_of(tiny_model(name)) == layout


def test_mixtral_has_its_own_layout():
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL))
    assert layout_of(model) == MIXTRAL


@pytest.mark.parametrize("name", PUBLISHED_AS)
def test_classes_that_are_published_without_asking_transformers_are_as_it_says(name):
    cls = getattr(transformers, name)
    config = cls.config_class(**SMALL, layer_types=["full_attention"])
    with torch.device("meta"):
        model = cls(config)
    assert layout_of(model) == PUBLISHED_AS[name]
    # What a config does not say is not tied.
    assert not cls.config_class().tie_word_embeddings
    assert not model._keys_to_ignore_on_save


def test_a_conversion_that_is_not_in_the_table_is_unknown():
    model = transformers.GraniteMoeForCausalLM(transformers.GraniteMoeConfig(**SMALL))
    assert layout_of(model) is None


@pytest.mark.parametrize("name", ["L", "Lt", "Q", "M"])
def test_a_skeleton_has_no_weights_and_the_buffers_of_a_build(name):
    model = tiny_model(name)
    skeleton = build(type(model), model.config, torch.bfloat16)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in skeleton.parameters())
    assert [n for n, _ in skeleton.named_parameters()] == [n for n, _ in model.named_parameters()]
    for key, buffer in model.named_buffers():
        assert torch.equal(skeleton.get_buffer(key), buffer)
        assert skeleton.get_buffer(key).dtype == buffer.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_range_over_several_tensors_is_read_as_one(tmp_path, dtype):
    size = BUFFER_BYTES // 4 + 7
    parts = [torch.randint(0, 2, (size,)).to(dtype), torch.ones(5, 3).to(dtype)]
    save_file({"a": parts[0], "b": parts[1]}, tmp_path / "model.safetensors")
    tensors = list_tensors(tmp_path)
    whole = torch.cat([part.flatten() for part in parts])
    for start, stop in [(0, len(whole)), (3, 4), (size - 2, size + 9), (5, 5)]:
        out = torch.empty(stop - start, dtype=dtype)
        with Reader() as reader:
            reader.fill([tensors["a"], tensors["b"]], start, out)
        assert torch.equal(out, whole[start:stop])
