"""distft: fine-tune Hugging Face models on many GPUs, the strategy being one argument.

Names load on first use, so that ``import distft`` and planning need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from distft.checkpoint.adopt import Adoption as Adoption
    from distft.checkpoint.adopt import adopt as adopt
    from distft.checkpoint.consolidation import consolidate as consolidate
    from distft.checkpoint.conversion import convert as convert
    from distft.checkpoint.difference import diff as diff
    from distft.checkpoint.folder import latest as latest
    from distft.checkpoint.inspection import Inspection as Inspection
    from distft.checkpoint.inspection import inspect as inspect
    from distft.checkpoint.pretrained import load_model as load_model
    from distft.checkpoint.serving import export_adapter as export_adapter
    from distft.checkpoint.verify import Verification as Verification
    from distft.checkpoint.verify import verify as verify
    from distft.diagnose.certificate import Certificate as Certificate
    from distft.diagnose.doctor import Diagnosis as Diagnosis
    from distft.diagnose.doctor import doctor as doctor
    from distft.diagnose.hangs import HangWatch as HangWatch
    from distft.diagnose.hangs import watch_hangs as watch_hangs
    from distft.diagnose.invariants import Invariants as Invariants
    from distft.diagnose.invariants import hold_invariants as hold_invariants
    from distft.diagnose.parity import parity as parity
    from distft.expert_lora import moe_lora as moe_lora
    from distft.measure.dry_run import DryRun as DryRun
    from distft.measure.dry_run import dry_run as dry_run
    from distft.measure.out_of_memory import OutOfMemory as OutOfMemory
    from distft.peft import load_adapter as load_adapter
    from distft.planner import Plan as Plan
    from distft.planner import plan as plan
    from distft.process_group import init as init
    from distft.spec import ModelSpec as ModelSpec
    from distft.spec import Workload as Workload
    from distft.strategies.base import Strategy as Strategy
    from distft.strategies.by_name import strategy as strategy
    from distft.strategies.ddp import DDP as DDP
    from distft.strategies.fsdp import FSDP2 as FSDP2
    from distft.strategies.fsdp import HSDP as HSDP
    from distft.strategies.parallel import EP as EP
    from distft.strategies.parallel import TP as TP
    from distft.strategies.parallel import NDParallel as NDParallel
    from distft.strategies.resharding import reshard as reshard
    from distft.strategies.zero import ZeRO1 as ZeRO1
    from distft.strategies.zero import ZeRO2 as ZeRO2
    from distft.strategies.zero3 import ZeRO3 as ZeRO3
    from distft.topology.cluster import Cluster as Cluster
    from distft.trainer.trainer import Trainer as Trainer
    from distft.training.evaluation import EvalResult as EvalResult
    from distft.training.experts import ExpertLoad as ExpertLoad
    from distft.training.step import StepResult as StepResult
    from distft.training.wrappers import unwrap as unwrap

_HOMES = {
    "Adoption": "distft.checkpoint.adopt",
    "Certificate": "distft.diagnose.certificate",
    "Cluster": "distft.topology.cluster",
    "DDP": "distft.strategies.ddp",
    "Diagnosis": "distft.diagnose.doctor",
    "DryRun": "distft.measure.dry_run",
    "EP": "distft.strategies.parallel",
    "EvalResult": "distft.training.evaluation",
    "ExpertLoad": "distft.training.experts",
    "FSDP2": "distft.strategies.fsdp",
    "HSDP": "distft.strategies.fsdp",
    "HangWatch": "distft.diagnose.hangs",
    "Inspection": "distft.checkpoint.inspection",
    "ModelSpec": "distft.spec",
    "Invariants": "distft.diagnose.invariants",
    "NDParallel": "distft.strategies.parallel",
    "OutOfMemory": "distft.measure.out_of_memory",
    "StepResult": "distft.training.step",
    "Plan": "distft.planner",
    "Strategy": "distft.strategies.base",
    "TP": "distft.strategies.parallel",
    "Trainer": "distft.trainer.trainer",
    "Verification": "distft.checkpoint.verify",
    "Workload": "distft.spec",
    "ZeRO1": "distft.strategies.zero",
    "ZeRO2": "distft.strategies.zero",
    "ZeRO3": "distft.strategies.zero3",
    "adopt": "distft.checkpoint.adopt",
    "consolidate": "distft.checkpoint.consolidation",
    "convert": "distft.checkpoint.conversion",
    "diff": "distft.checkpoint.difference",
    "dry_run": "distft.measure.dry_run",
    "export_adapter": "distft.checkpoint.serving",
    "doctor": "distft.diagnose.doctor",
    "hold_invariants": "distft.diagnose.invariants",
    "init": "distft.process_group",
    "inspect": "distft.checkpoint.inspection",
    "latest": "distft.checkpoint.folder",
    "load_adapter": "distft.peft",
    "load_model": "distft.checkpoint.pretrained",
    "moe_lora": "distft.expert_lora",
    "parity": "distft.diagnose.parity",
    "plan": "distft.planner",
    "reshard": "distft.strategies.resharding",
    "strategy": "distft.strategies.by_name",
    "unwrap": "distft.training.wrappers",
    "verify": "distft.checkpoint.verify",
    "watch_hangs": "distft.diagnose.hangs",
}
_SUBMODULES = ("formulas", "measure", "testing", "topology")

__all__ = [*sorted(_HOMES), *_SUBMODULES]


def __getattr__(name: str) -> Any:
    """Load a public name on first use."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"distft.{name}")
    raise AttributeError(f"module 'distft' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(__all__)
