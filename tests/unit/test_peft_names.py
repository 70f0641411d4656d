"""PEFT's names that adapters on split layers use: fails first when they move."""

from __future__ import annotations

import inspect

import pytest

from distft.peft import attach_adapters
from distft.strategies import adapters, expert_adapters
from distft.testing import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")


def test_a_wrapped_parameter_folds_its_factors_in_a_context_of_its_own():
    wrapper = expert_adapters.require_wrapper()
    assert list(inspect.signature(wrapper._activate_lora).parameters) == ["self", "active_adapters"]
    assert "self._activate_lora(self.active_adapters)" in inspect.getsource(wrapper.forward)


@pytest.mark.parametrize("model", ["M", "G"])
def test_the_factors_of_experts_lie_as_the_fold_here_reads_them(model):
    import torch
    from peft import LoraConfig

    config = LoraConfig(
        r=3,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,
    )
    made = attach_adapters(tiny_model(model), config, seed=0)
    found = [m for m in made.modules() if isinstance(m, expert_adapters.require_wrapper())]
    assert found
    for wrapper in found:
        weight = wrapper.get_param().detach()
        factors = {side: getattr(wrapper, side)["default"].weight for side in ("lora_A", "lora_B")}
        a, b = (tensor.detach() for tensor in factors.values())
        transposed = getattr(wrapper.get_base_layer(), "is_transposed", False)
        folded = expert_adapters.fold(weight, a, b, wrapper.scaling["default"], transposed)
        torch.testing.assert_close(folded, weight + wrapper.get_delta_weight("default").detach())


@pytest.mark.parametrize("name", adapters.NEEDS_WHOLE)
def test_settings_that_need_whole_weights_are_settings_of_peft(name):
    from peft import LoraConfig

    assert hasattr(LoraConfig(), name)


def test_a_module_to_save_is_a_copy_beside_the_original():
    from peft import LoraConfig

    config = LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"])
    made = attach_adapters(tiny_model("L"), config, seed=0)
    wrapper = made.get_submodule("base_model.model.model.norm")
    assert type(wrapper).__name__ == "ModulesToSaveWrapper"
    assert wrapper.modules_to_save["default"] is not wrapper.original_module
