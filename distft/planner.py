"""`plan`: every strategy on a machine, ranked by what it holds and how long a step takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distft.formulas._numbers import choice, whole
from distft.formulas.reports import table
from distft.planning.calibration import Calibration, calibrated
from distft.planning.candidates import NATIVE, candidates
from distft.planning.fits import MARGIN
from distft.planning.options import Option, Setting
from distft.planning.reasons import reasons
from distft.spec import ModelSpec, Workload
from distft.topology import Cluster

if TYPE_CHECKING:
    from distft.interop import Recipe

GIB = 2**30
# Speeds closer than this are a tie, which the plainer strategy wins.
TIE = 0.03
_HEAD = (
    "strategy",
    "fits",
    "peak GiB",
    "free GiB",
    "step s",
    "tokens/s",
    "MFU %",
    "binds",
    "smallest change that fits",
)


@dataclass(frozen=True)
class Plan:
    """Strategies on a machine, the best first. Made by `plan`.

    Args:
        setting: The model, the load, the machine and the policies that all share.
        options: The strategies, those that fit first, then by speed.
        calibration: The measured runs behind it, None without.
    """

    setting: Setting
    options: tuple[Option, ...]
    calibration: Calibration | None = None

    @property
    def best(self) -> Option:
        """The first option: the fastest that fits, or the plainer one of a tie.

        Where none fits, the one that is fastest after its smallest change.
        """
        return self.options[0]

    def table(self) -> str:
        """Return the options as a table, and below it what it assumes."""
        return "\n".join((table(_HEAD, self._rows()), "", *self.notes))

    def __str__(self) -> str:
        """The table."""
        return self.table()

    @cached_property
    def notes(self) -> list[str]:
        """What the numbers mean and what they assume, each in one sentence."""
        setting, load = self.setting, self.setting.load
        gpu = setting.cluster.gpu
        assert gpu is not None
        return [
            f"{setting.spec}",
            f"{setting.num_ranks} x {gpu.name} ({setting.capacity / GIB:.1f} GiB, "
            f"{gpu.flops / 1e12:.0f} bf16 TFLOP/s, {setting.cluster.fabric}); {load.tuning} tuning "
            f"in {setting.precision}, micro_batch={load.micro_batch}, seq_len={load.seq_len}, "
            f"grad_accum={load.grad_accum}, {load.attention} attention, {load.loss} loss, "
            f"{'with' if setting.checkpointing else 'no'} activation checkpointing.",
            "Peak: live tensors of the heaviest rank in its fullest phase (torch's allocated). "
            f"Fits: {MARGIN} times the peak, and CUDA's context and NCCL, within the GPU.",
            "Step: FLOPs over the reachable share of the peak, and what the wires take beyond it "
            "that nothing hides; sources in distft.formulas.speed and distft.topology.links.",
            *([str(self.calibration)] if self.calibration else []),
        ]

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                option.label,
                "yes" if option.fits else "no",
                f"{option.peak_bytes / GIB:.1f}",
                f"{option.free_bytes / GIB:.1f}",
                f"{option.time.seconds:.3f}",
                f"{option.tokens_per_second:,.0f}",
                f"{100 * option.mfu:.0f}",
                option.binds,
                "" if option.change is None else option.change.what,
            )
            for option in self.options
        ]

    def to_markdown(self) -> str:
        """Return the table and the reasons of the best option as Markdown."""
        lines = [f"| {' | '.join(_HEAD)} |", f"|{'---|' * len(_HEAD)}"]
        lines += [f"| {' | '.join(row)} |" for row in self._rows()]
        lines += ["", *(f"- {note}" for note in self.notes), "", f"## Why {self.best.label}", ""]
        lines += [f"- {reason}" for reason in reasons(self.best)]
        return "\n".join(lines) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers as plain values."""
        setting = self.setting
        return {
            "num_gpus": setting.num_ranks,
            "gpu": setting.cluster.gpu.name if setting.cluster.gpu else None,
            "capacity_bytes": setting.capacity,
            "precision": setting.precision,
            "activation_checkpointing": setting.checkpointing,
            "total_params": setting.spec.total_params,
            "active_params": setting.spec.active_params,
            "trainable_params": setting.adapters or setting.spec.total_params,
            "best": self.best.label,
            "margin": MARGIN,
            "notes": self.notes,
            "options": [option.as_dict() for option in self.options],
        }

    def to_json(self) -> str:
        """Return all numbers as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def to_html(self) -> str:
        """Return a report with the table, the reasons and the plots, in one file."""
        from distft.planning.pages import page

        return page(self, _HEAD, self._rows())

    def plot(self, path: str | Path) -> Path:
        """Write the memory staircase, the time of a step and the roofline into one picture.

        Args:
            path: File to write; its ending says the format.

        Raises:
            ValueError: The ending is none of png, svg and pdf.
        """
        from distft.planning.plots import draw

        return draw(self, Path(path))

    def export(self, path: str | Path, option: Option | None = None) -> Path:
        """Write an option for another tool, which `distft.interop.read` reads back.

        Args:
            path: File to write: "accelerate.yaml", "deepspeed.json", "launch.sh",
                "parallelism_config.json" (accelerate's class) or "distributed_config.json"
                (transformers').
            option: The option; default the best.

        Raises:
            ValueError: The name is none of these, or the tool has no such strategy.
        """
        from distft.interop import write

        return write(recipe_of(option or self.best), Path(path))

    def calibrate(self, measured: Mapping[str, Mapping[str, float]]) -> Plan:
        """Return the plan with its factors fitted to one or two measured runs.

        What lies beside model state is scaled by one factor, seconds by another: the means of
        measured over predicted. The errors before and after are among the notes.

        Args:
            measured: By an option's label, `peak_bytes` (torch's `max_memory_allocated`) or
                `step_seconds` or both: `{"FSDP2": {"peak_bytes": 41e9, "step_seconds": 1.9}}`.

        Raises:
            ValueError: No option has such a label, or a number is none.
        """
        setting, calibration = calibrated(self.setting, self.options, measured)
        return replace(_ranked(setting), calibration=calibration)


def plan(
    spec: Any,
    load: Workload | None = None,
    cluster: Cluster | str = "8xH100-SXM",
    *,
    num_gpus: int | None = None,
    precision: str | None = None,
    activation_checkpointing: bool = False,
    compile: bool = False,
    offload: str | None = None,
) -> Plan:
    """Return every strategy and sensible product of axes on a machine, ranked.

    Needs neither torch nor a GPU. The micro-batch is that of one data rank under each.

    Args:
        spec: A `ModelSpec`, or what `ModelSpec.from_config` takes, such as "Qwen3-30B-A3B".
        load: Load of one step; default one row of 4,096 tokens, full tuning.
        cluster: The machine, or the name of a preset.
        num_gpus: GPUs that train; default all.
        precision: As of a strategy; default "bf16-mixed", with adapters "bf16".
        activation_checkpointing: Whether blocks are computed again in the backward pass.
        compile: Whether blocks are compiled.
        offload: What strategies that can hold on the host: "optimizer" or "params".

    Raises:
        ValueError: The model's widths or the GPU are not known, a name is unknown, there are fewer
            GPUs, or no strategy can offload so.

    Collective: none.

    >>> plan("Qwen3-30B-A3B", cluster="8xH200-SXM", activation_checkpointing=True).best.fits
    True
    """
    if not isinstance(spec, ModelSpec):
        spec = ModelSpec.from_config(spec)
    if isinstance(cluster, str):
        cluster = Cluster.preset(cluster)
    load = load or Workload()
    ranks = cluster.num_gpus if num_gpus is None else whole("num_gpus", num_gpus, 1)
    _check(spec, cluster, ranks)
    precision = precision or ("bf16-mixed" if load.tuning == "full" else "bf16")
    choice("precision", precision, NATIVE)
    if offload is not None:
        choice("offload", offload, ("optimizer", "params"))
    return _ranked(
        Setting(
            spec,
            spec.shape,
            load,
            cluster,
            ranks,
            precision,
            activation_checkpointing,
            compile,
            offload or "",
        )
    )


def recipe_of(option: Option) -> Recipe:
    """Return an option as plain values: the strategy, its ranks and its load.

    Collective: none.
    """
    from distft.interop import Recipe

    setting, candidate = option.setting, option.candidate
    policies = {
        "precision": (setting.precision, "fp32"),
        "activation_checkpointing": (setting.checkpointing, False),
        "compile": ("block" if setting.compile else None, None),
        "offload": (setting.offload or None, None),
    }
    chosen = {key: value for key, (value, default) in policies.items() if value != default}
    names = {"NDParallel": "nd"}
    return Recipe(
        names.get(candidate.name, candidate.name.lower()),
        {**dict(candidate.fields), **chosen},
        setting.num_ranks,
        max(1, -(-setting.num_ranks // setting.cluster.gpus_per_node)),
        setting.load.micro_batch,
        setting.load.grad_accum,
    )


def _check(spec: ModelSpec, cluster: Cluster, ranks: int) -> None:
    if spec.shape is None:
        raise ValueError(
            f"The widths of this model with {len(spec.tensors)} tensors are not known, so that "
            "nothing can be said of its activations. Use ModelSpec.from_config."
        )
    if cluster.gpu is None:
        raise ValueError(
            "The kind of GPU is not known, and with it neither memory nor speed. "
            "Pass Cluster.parse(text, gpu=...) a name such as 'H100-80GB'."
        )
    if ranks > cluster.num_gpus:
        raise ValueError(
            f"num_gpus is {ranks}, but the cluster has {cluster.num_gpus}. "
            f"Pass at most {cluster.num_gpus}, or a cluster of more nodes."
        )


def _ranked(setting: Setting) -> Plan:
    found = [
        Option(candidate, setting)
        for candidate in candidates(setting.shape, setting.cluster, setting.num_ranks)
        if not setting.offload
        or _can_offload(candidate.offload(setting.precision), setting.offload)
    ]
    if not found:
        raise ValueError(
            f"offload={setting.offload!r} is given, but none of the strategies on "
            f"{setting.num_ranks} GPUs can. Leave it out."
        )
    fitting = sorted((x for x in found if x.fits), key=lambda x: -x.tokens_per_second)
    others = sorted((x for x in found if not x.fits), key=_after_change)
    if fitting:
        tied = [x for x in fitting if x.tokens_per_second >= (1 - TIE) * _speed(fitting[0])]
        best = min(tied, key=found.index)
        fitting = [best, *(x for x in fitting if x is not best)]
    return Plan(setting, (*fitting, *others))


def _can_offload(most: str, wanted: str) -> bool:
    return most == wanted or (most == "params" and wanted == "optimizer")


def _speed(option: Option) -> float:
    return option.tokens_per_second


def _after_change(option: Option) -> tuple[int, float]:
    """Order options that do not fit: by the size of the change that helps, then by speed."""
    if option.change is None:
        return 99, 0.0
    return option.change.size, -option.change.tokens_per_second
