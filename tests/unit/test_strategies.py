"""Strategies as values: names, fields, meshes, guards that need no ranks."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys

import pytest

import distft
from distft import DDP, FSDP2, HSDP, TP, ZeRO1, ZeRO2, ZeRO3
from distft.mesh import Mesh
from distft.strategies.by_name import STRATEGIES
from distft.strategies.guards import OFFLOADS

ALL = [DDP(), ZeRO1(), ZeRO2(), ZeRO3(), FSDP2(), HSDP()]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_name_gives_its_strategy(name):
    assert distft.strategy(name) == STRATEGIES[name]()
    assert distft.strategy(name).name == name


def test_a_strategy_prints_as_its_constructor():
    made = HSDP(dp_replicate=2, precision="bf16-mixed")
    assert repr(made) == "HSDP(precision='bf16-mixed', dp_replicate=2)"
    assert eval(repr(made)) == made


@pytest.mark.parametrize("strategy", ALL, ids=str)
def test_a_strategy_pickles_to_an_equal_value(strategy):
    assert pickle.loads(pickle.dumps(strategy)) == strategy


def test_an_unknown_name_lists_all_and_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"ddp, zero1, zero2.*Did you mean 'fsdp2'\?"):
        distft.strategy("fsdp")


def test_an_unknown_field_lists_all_and_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"HSDP has no field 'replicate'.*'dp_replicate'\?"):
        distft.strategy("hsdp", replicate=2)


def test_fp16_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"precision='fp16'.*Use bf16-mixed"):
        DDP(precision="fp16")


@pytest.mark.parametrize(("field", "value"), [("compile", "model")])
def test_a_field_that_would_be_ignored_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}='{value}'"):
        FSDP2(**{field: value})


def test_a_block_split_over_ranks_is_not_compiled():
    with pytest.raises(ValueError, match=r"TP\(compile='block'\)"):
        distft.TP(compile="block")


@pytest.mark.parametrize(
    ("strategy", "offload", "text"),
    [
        (DDP, "params", r"DDP has no offload\. 'params' is there for ZeRO3, FSDP2 and HSDP"),
        (
            FSDP2,
            "optimizer",
            r"FSDP2 has 'params'\. 'optimizer' is there for ZeRO1, ZeRO2 and ZeRO3",
        ),
        (HSDP, "nvme:/disk", r"HSDP has 'params'\. 'nvme:PATH' is there for ZeRO3\. Or leave"),
        (ZeRO2, "nvme:/disk", r"ZeRO2 has 'optimizer'\. 'nvme:PATH' is there for ZeRO3"),
        (DDP, "nvme:/disk", r"DDP has no offload\. 'nvme:PATH' is there for ZeRO3"),
        (ZeRO3, "nvme:", r"The 3 kinds are 'optimizer' and 'params' and 'nvme:PATH'"),
        (ZeRO2, "params", r"ZeRO2 has 'optimizer'\. 'params' is there for ZeRO3"),
        (ZeRO3, "cpu", r"ZeRO3 has 'optimizer' and 'params' and 'nvme:PATH'\. The 3 kinds are"),
        (TP, "params", r"TP has no offload"),
    ],
)
def test_an_offload_that_a_strategy_has_not_is_refused_with_what_it_has(strategy, offload, text):
    with pytest.raises(ValueError, match=text):
        strategy(offload=offload)


def test_the_error_names_the_strategies_that_have_an_offload():
    for kind, text in OFFLOADS.items():
        has = {
            c.__name__ for c in (DDP, ZeRO1, ZeRO2, ZeRO3, FSDP2, HSDP, TP) if kind in c.offloads
        }
        assert set(text.replace(" and ", ", ").split(", ")) == has


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_a_degree_that_is_no_positive_integer_is_refused(size):
    with pytest.raises(ValueError, match="a degree is an integer of at least 1"):
        HSDP(dp_replicate=size)


def test_a_bucket_of_no_elements_is_refused():
    with pytest.raises(ValueError, match=r"ZeRO2\(reduce_bucket_size=0\)"):
        ZeRO2(reduce_bucket_size=0)


@pytest.mark.parametrize(
    ("strategy", "ranks", "mesh"),
    [
        (DDP(), 8, Mesh(dp_replicate=8)),
        (ZeRO3(), 8, Mesh(dp_shard=8)),
        (FSDP2(), 8, Mesh(dp_shard=8)),
        (HSDP(dp_replicate=2), 8, Mesh(dp_replicate=2, dp_shard=4)),
        (HSDP(dp_shard=4), 8, Mesh(dp_replicate=2, dp_shard=4)),
    ],
    ids=str,
)
def test_a_degree_left_open_takes_the_ranks_that_remain(strategy, ranks, mesh):
    assert strategy.mesh(ranks) == mesh
    assert mesh.dp_size == ranks


def test_hsdp_alone_shards_over_the_ranks_of_one_machine(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert HSDP().mesh(8) == Mesh(dp_replicate=2, dp_shard=4)


def test_without_a_process_group_the_error_says_to_init():
    with pytest.raises(RuntimeError, match=r"needs a process group.*distft\.init\(\)"):
        DDP().apply(None, None)


def test_without_deepspeed_the_error_names_the_extra(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "deepspeed" else find(name)
    )
    with pytest.raises(RuntimeError, match=r"pip install 'distft\[deepspeed\]'"):
        ZeRO2()._check_installed()


def test_importing_distft_imports_no_torch():
    use = "distft.ModelSpec; distft.strategy('fsdp2')"
    code = f"import sys, distft; {use}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_every_public_name_loads():
    for name in distft.__all__:
        assert getattr(distft, name) is not None


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'zero4'"):
        _ = distft.zero4
