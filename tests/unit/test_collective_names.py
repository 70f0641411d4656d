"""torch's names of collectives that the byte counter knows: fails first when one is added."""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives
import torch.distributed.tensor

from distft.measure import collectives as known

# What moves nothing, or from one rank to one other.
NO_COLLECTIVES = {
    "_wrap_tensor_autograd",
    "barrier",
    "batch_p2p_ops",
    "check_for_nan",
    "irecv",
    "isend",
    "mesh_get_process_group",
    "monitored_barrier_",
    "recv_",
    "recv_any_source_",
    "send",
    "wait_tensor",
}


def schemas(*namespaces):
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace in namespaces and name not in NO_COLLECTIVES:
            yield name, schema


def test_every_collective_of_torch_is_counted():
    assert {name for name, _ in schemas("c10d")} <= set(known._FULL_BUFFER)
    functional = [name for name, _ in schemas(*known._FUNCTIONAL_NAMESPACES)]
    assert functional
    assert all(any(name.startswith(start) for start in known._FUNCTIONAL) for name in functional)


def test_every_collective_has_an_argument_that_is_its_group():
    for _, schema in schemas("c10d", *known._FUNCTIONAL_NAMESPACES):
        names = {argument.name for argument in schema.arguments}
        assert len(names & set(known._GROUP_ARGUMENTS)) == 1, schema


def test_a_group_is_found_by_its_name():
    from torch.distributed.distributed_c10d import _resolve_process_group

    assert callable(_resolve_process_group)
