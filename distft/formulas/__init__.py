"""Costs in closed form: pure functions of the standard library, each with its source."""

from distft.formulas.activations import MicroStep
from distft.formulas.counts import expert_lora_params, lora_params
from distft.formulas.deepspeed import flat_numel, zero_memory, zero_traffic
from distft.formulas.experts import expert_imbalance, expert_slowdown
from distft.formulas.fetch import FetchLimits, Visit, fetch_counts
from distft.formulas.memory import chunk_rows, lora_state_bytes, model_state_bytes
from distft.formulas.native import ddp_memory, ddp_traffic, sharded_memory, sharded_traffic
from distft.formulas.parallel import parallel_memory
from distft.formulas.parallel_traffic import parallel_traffic
from distft.formulas.reports import Collective, MemoryLine, MemoryReport, TrafficReport
from distft.formulas.time import pipeline_bubble, seconds, training_flops
from distft.formulas.traffic import (
    context_parallel_bytes,
    expert_parallel_bytes,
    ring_bytes,
    ring_fraction,
    sum_ring_bytes,
    tensor_parallel_bytes,
    zero_traffic_bytes,
)
from distft.formulas.zero_plus import ZeROPlus, quantization_groups, zero_plus_bytes

__all__ = [
    "Collective",
    "FetchLimits",
    "MemoryLine",
    "MemoryReport",
    "MicroStep",
    "TrafficReport",
    "Visit",
    "ZeROPlus",
    "chunk_rows",
    "context_parallel_bytes",
    "ddp_memory",
    "ddp_traffic",
    "expert_imbalance",
    "expert_lora_params",
    "expert_parallel_bytes",
    "expert_slowdown",
    "fetch_counts",
    "flat_numel",
    "lora_params",
    "lora_state_bytes",
    "model_state_bytes",
    "parallel_memory",
    "parallel_traffic",
    "pipeline_bubble",
    "quantization_groups",
    "ring_bytes",
    "ring_fraction",
    "seconds",
    "sharded_memory",
    "sharded_traffic",
    "sum_ring_bytes",
    "tensor_parallel_bytes",
    "training_flops",
    "zero_memory",
    "zero_plus_bytes",
    "zero_traffic",
    "zero_traffic_bytes",
]
