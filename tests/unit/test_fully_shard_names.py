"""The private names of ``fully_shard`` that distft reads: this fails first when one moves."""

from __future__ import annotations

import inspect

from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_state


def test_a_unit_has_its_groups_and_their_parameters():
    assert callable(FSDPModule._get_fsdp_state)
    text = inspect.getsource(_fsdp_state)
    assert "_fsdp_param_groups" in text


def test_a_sharded_parameter_has_its_dtypes():
    text = inspect.getsource(_fsdp_param.FSDPParam)
    for name in ("reduce_dtype", "param_dtype", "orig_dtype", "sharded_param"):
        assert f"self.{name}" in text
