"""Tables and pictures of the pages that come from the library itself: python docs/generate.py.

A page holds them between ``<!-- generated: name -->`` and ``<!-- end -->``; pictures lie in
``docs/pictures``. A test holds both to what this prints.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import distft
from distft import _HOMES as HOMES
from distft.interop.accelerate import DROPPED, from_fsdp_sections, from_yaml
from distft.interop.deepspeed_json import from_deepspeed
from distft.interop.recipe import Recipe
from distft.topology import PRESETS

DOCS = Path(__file__).parent
ROOT = DOCS.parent
_BLOCK = re.compile(r"(<!-- generated: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
# What the strategy pages compare: the same model, rows and ranks on each.
_MODEL, _RANKS = "Qwen3-8B", 8
_STRATEGIES = {
    "ddp": distft.DDP(precision="bf16-mixed"),
    "zero1": distft.ZeRO1(precision="bf16-mixed"),
    "zero2": distft.ZeRO2(precision="bf16-mixed"),
    "zero3": distft.ZeRO3(precision="bf16-mixed"),
    "fsdp2": distft.FSDP2(precision="bf16-mixed"),
    "hsdp": distft.HSDP(dp_replicate=2, dp_shard=4, precision="bf16-mixed"),
    "tp": distft.TP(tp=8, precision="bf16-mixed"),
    "ep": distft.EP(ep=8, precision="bf16-mixed"),
    "nd": distft.NDParallel(dp_shard=4, tp=2, precision="bf16-mixed"),
}
# What a newcomer asks first: this model, tuned so, on that machine.
_QUESTIONS = (
    ("Qwen3-0.6B", "full", "2xRTX4090"),
    ("Qwen3-8B", "qlora", "2xRTX4090"),
    ("Qwen3-8B", "lora", "4xL40S"),
    ("Qwen3-8B", "full", "8xL40S"),
    ("Qwen3-8B", "full", "8xH100-PCIe"),
    ("Qwen3-8B", "full", "8xH100-SXM"),
    ("Qwen3-32B", "full", "8xH100-SXM"),
    ("Qwen3-32B", "full", "8xH200-NVL"),
    ("Qwen3-30B-A3B", "full", "8xH200-SXM"),
)
_PICTURES = {
    "nvswitch": "8xH100-SXM",
    "nvl-quads": "8xH200-NVL",
    "nvl-pairs": "8xH100-PCIe",
    "pcie": "8xL40S",
}
# Columns of results that have a bound, and what stands on the other side of each.
_RATIOS = ("ratio of medians", "median ratio", "peak / sum", "share, %", "peak MB", "seconds")
_BESIDE = {
    "median ratio": "the same by hand",
    "peak / sum": "its part, the largest tensor and the interpreter",
    "share, %": "the whole step, in %",
    "peak MB": "a limit in MB of memory",
    "seconds": "a limit in seconds",
}
# Okabe and Ito: told apart with every kind of colour vision.
_COLOURS = {
    "NV": "#0072B2",
    "PIX": "#009E73",
    "PHB": "#009E73",
    "NODE": "#E69F00",
    "SYS": "#999999",
}


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f}"


def costs(names: tuple[str, ...] = tuple(_STRATEGIES)) -> str:
    """Return a table of what strategies hold and send for one model."""
    rows = []
    for name in names:
        strategy = _STRATEGIES[name]
        model = "Qwen3-30B-A3B" if name == "ep" else _MODEL
        spec = distft.ModelSpec.from_config(model)
        load = distft.Workload(micro_batch=1, seq_len=4096)
        held = strategy.memory(spec, load, world_size=_RANKS)
        sent = strategy.traffic(spec, load, world_size=_RANKS)
        state, moved = held.model_state_bytes, sent.bytes_per_step
        rows.append((f"`{strategy!r}`", model, *map(_gigabytes, (state, held.peak_bytes, moved))))
    head = ("strategy", "model", "state, GB a rank", "peak, GB a rank", "sent, GB a rank and step")
    return _table(head, rows)


def choices() -> str:
    """Return a table of the planner's first choice for each question."""
    rows = []
    for model, tuning, cluster in _QUESTIONS:
        load = distft.Workload(micro_batch=1, seq_len=4096, tuning=tuning, loss="chunked")
        found = distft.plan(model, load, cluster)
        best = found.best
        fits = f"{sum(option.fits for option in found.options)} of {len(found.options)}"
        told = "fits" if best.fits else "does not fit"
        peak = f"{best.peak_bytes / 1e9:.0f} GB"
        rows.append((model, tuning, cluster, f"`{best.label}`", told, peak, fits))
    head = (
        "model",
        "tuning",
        "machine",
        "the planner's first",
        "it",
        "peak a GPU",
        "options that fit",
    )
    return _table(head, rows)


def fsdp1() -> str:
    """Return a table of the flags of FSDP1 that have no counterpart, and why."""
    return _table(("flag", "why it is dropped"), [(f"`{k}`", v) for k, v in DROPPED.items()])


def _results(start: str) -> tuple[str, str]:
    """Return the newest result of a benchmark: its path in the repository, and its text."""
    path = max((ROOT / "benchmarks" / "results").glob(f"{start}_*.md"))
    return path.relative_to(ROOT).as_posix(), path.read_text("utf-8")


def _row(text: str, first: str) -> list[str]:
    """Return the cells of the row of a table that begins with a word."""
    return next(
        [cell.strip() for cell in line.strip("|\n ").split("|")]
        for line in text.splitlines()
        if line.startswith(f"| {first} |")
    )


def step(name: str) -> str:
    """Return what a step costs beside the same one by hand."""
    path, text = _results("qwen3-4m")
    _, _, _, _, median, interval, *_ = _row(text, name)
    return (
        f"A step costs {float(median):.3f} times the same step written by hand (95 % interval "
        f"{interval}): CPU ranks, a model of\n4 million parameters (`{path}`).\n"
    )


def accuracy() -> str:
    """Return how far the planner is from what others measured."""
    path, text = _results("planner-points")
    found = json.loads(re.search(r"^\{.*median_error_pct.*\}$", text, re.MULTILINE)[0])
    peaks, speeds = _row(text, "peaks"), _row(text, "speeds")
    peak, speed = found["median_error_pct"], found["throughput_median_error_pct"]
    return (
        f"Against what others measured: half of {peaks[1]} peaks are within {peak:.1f} %, "
        f"half of {speeds[1]} speeds within {speed:.1f} %,\n"
        f"and {found['within_20_pct_tier_a']:.0f} % of the peaks of tier A within 20 %. Held out, "
        f"with the numbers that are fitted taken from other sources:\n"
        f"{peaks[2]} and {speeds[2]} (`{path}`).\n"
    )


def conversions() -> str:
    """Return how long conversions take beside their peers."""
    path, text = _results("llama-1290mb-checkpoint")
    names = {
        "zero-3 to safetensors": "ZeRO-3 to safetensors",
        "zero_to_fp32": "the same by DeepSpeed's `zero_to_fp32`",
        "dcp to safetensors": "DCP to safetensors",
        "dcp_to_torch_save": "the same to one file by torch's `dcp_to_torch_save`",
        "cp weights": "`cp` of the weights",
        "zero-3 with optimizer to universal": "ZeRO-3 with its optimizer to universal",
        "ds_to_universal": "the same by DeepSpeed's `ds_to_universal`",
    }
    rows = [(told, *(_row(text, name)[at] for at in (2, 4))) for name, told in names.items()]
    table = _table(("1.29 GB of fp32 weights", "median, s", "peak, MB"), rows)
    return f"{table}\nMedians of 5, 2 cores, warm cache (`{path}`).\n"


def measured() -> str:
    """Return every ratio of `benchmarks/results` that has a bound, the worst of each kind."""
    worst: dict[tuple[str, str], tuple[float, str, str]] = {}
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.md")):
        head: list[str] = []
        for line in path.read_text("utf-8").splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if not line.startswith("|"):
                head = []
            elif not head:
                head = cells
            elif set(line) - set("|- ") and head[-1].startswith("at most"):
                at = next(head.index(name) for name in _RATIOS if name in head)
                bound = head[-1].removeprefix("at most").strip(" %") or cells[-1]
                other = cells[1] if head[1] == "compared with" else _BESIDE.get(head[at], "")
                what = f"{cells[0]} {head[0]}" if cells[0][0].isdigit() else cells[0]
                key = what + (f" beside {other}" if other else ""), path.name
                found = (float(cells[at]), bound, head[at])
                worst[key] = max(worst.get(key, found), found)
    rows = []
    for (what, name), (ratio, bound, _) in worst.items():
        missed = bound[:1].isdigit() and ratio > float(bound)
        shown = f"{ratio:g} (missed)" if missed else f"{ratio:g}"
        link = f"[{name.split('_')[0]}](benchmarks/results/{name})"
        rows.append((what, shown, bound, link))
    return _table(("what, beside what", "measured", "at most", "result"), rows)


def _strategy(recipe: Recipe) -> str:
    return f"`{distft.strategy(recipe.name, **recipe.fields)!r}`"


def fsdp1_strategies() -> str:
    """Return a table of the sharding strategies of FSDP1 and what each is here."""
    rows = []
    for said in ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "NO_SHARD"):
        config = {"fsdp_config": {"fsdp_sharding_strategy": said}}
        rows.append((f"`{said}`", _strategy(from_fsdp_sections(config, {}, {}))))
    return _table(("`fsdp_sharding_strategy`", "here"), rows)


def accelerate() -> str:
    """Return a table of keys of accelerate's YAML and what each is here, as `interop.read` says."""
    fsdp = "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, %s}"
    zero = "distributed_type: DEEPSPEED\ndeepspeed_config: {%s}"
    rows = [
        ("distributed_type: MULTI_GPU",) * 2,
        *((f"mixed_precision: {p}", f"distributed_type: MULTI_GPU\nmixed_precision: {p}")
          for p in ("bf16", "'no'")),
        *((key, fsdp % key) for key in (
            "fsdp_version: 2", "fsdp_reshard_after_forward: false",
            "fsdp_activation_checkpointing: true", "fsdp_offload_params: true")),
        *((key, zero % key) for key in (
            "zero_stage: 1", "zero_stage: 2", "zero_stage: 3",
            "zero_stage: 3, offload_param_device: cpu",
            "zero_stage: 2, offload_optimizer_device: cpu")),
        *((f"parallelism_config: {{{sizes}}}", (fsdp % "") + f"\nparallelism_config: {{{sizes}}}")
          for sizes in (
            "parallelism_config_dp_replicate_size: 2, parallelism_config_dp_shard_size: 4",
            "parallelism_config_dp_shard_size: 4, parallelism_config_tp_size: 2")),
    ]  # fmt: skip
    return _table(
        ("in accelerate's YAML", "here"),
        [(f"`{said}`", _strategy(from_yaml(text))) for said, text in rows],
    )


def deepspeed() -> str:
    """Return a table of keys of DeepSpeed's JSON and what each is here, as `interop.read` says."""
    zero = '"zero_optimization": '
    rows = (
        *(f'{zero}{{"stage": {stage}}}' for stage in range(4)),
        f'{zero}{{"stage": 2, "offload_optimizer": {{"device": "cpu"}}}}',
        f'{zero}{{"stage": 3, "offload_param": {{"device": "cpu"}}}}',
        f'{zero}{{"stage": 3}}, "bf16": {{"enabled": true}}',
    )
    return _table(
        ("in DeepSpeed's JSON", "here"),
        [(f"`{said}`", _strategy(from_deepspeed(json.loads(f"{{{said}}}")))) for said in rows],
    )


def machines() -> str:
    """Return a table of the machines that are known by name."""
    rows = []
    for name in PRESETS:
        cluster = distft.Cluster.preset(name)
        each = cluster.gpus_per_node
        groups = "; ".join(",".join(map(str, group)) for group in cluster.nvlink_groups)
        two, all_of = (cluster.bus_bandwidth("all_gather", n) / 1e9 for n in (2, each))
        rows.append((f"`{name}`", cluster.fabric, groups, f"{two:.0f}", f"{all_of:.0f}"))
    head = ("machine", "fabric", "NVLink groups", "2 GPUs, GB/s", "all GPUs of a node, GB/s")
    return _table(head, rows)


def imports() -> str:
    """Return what each part of the package imports of the others, outside of type checking."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted((ROOT / "distft").rglob("*.py")):
        importer = _part(path.relative_to(ROOT).with_suffix("").parts)
        for name in _imported(ast.parse(path.read_text("utf-8"))):
            found[importer].add(_part(tuple(name.split("."))))
    lines = []
    for part in sorted(found):
        others = sorted(found[part] - {part, ""})
        if part and others:
            lines.append(f"{part:<16} → {', '.join(others)}")
    return "```\n" + "\n".join(lines) + "\n```\n"


def _part(names: tuple[str, ...]) -> str:
    """Return the part of the package that a module belongs to: its package, or the module."""
    if len(names) < 2 or names[1] == "__init__":
        return ""
    if names[1] in HOMES:
        names = tuple(HOMES[names[1]].split("."))
    return names[1]


def _imported(tree: ast.AST) -> list[str]:
    """Return the modules of distft that a module imports, in functions too."""
    names = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("distft"):
            whole = node.module == "distft"
            names += [f"distft.{a.name}" for a in node.names] if whole else [node.module or ""]
        elif isinstance(node, ast.Import):
            names += [a.name for a in node.names if a.name.startswith("distft.")]
        names += _imported(node)
    return names


def picture(name: str) -> str:
    """Return a picture of a machine: four GPUs to a square, a line for each link."""
    cluster = distft.Cluster.preset(_PICTURES[name])
    count = cluster.gpus_per_node
    drawn, seen = [], {}
    for first in range(count):
        for second in range(first + 1, count):
            hop = cluster.slowest_hop([first, second])
            assert hop is not None
            kind = "NV" if hop.link.startswith("NV") else hop.link
            seen[kind] = hop.link
            if kind != "SYS":
                drawn.append(_line(_place(first), _place(second), kind))
    # NVLink over what is slower.
    drawn.sort(key=lambda line: _COLOURS["NV"] in line)
    for gpu in range(count):
        x, y = _place(gpu)
        drawn.append(f'<circle cx="{x}" cy="{y}" r="18" fill="#fff" stroke="#333"/>')
        drawn.append(f'<text x="{x}" y="{y + 5}" text-anchor="middle">{gpu}</text>')
    drawn += _legend(seen)
    width = _place(count - 1)[0] + 60
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 300" width="{width}" '
        f'font-family="sans-serif" font-size="14"><title>{_PICTURES[name]}</title>\n'
        f'<rect width="{width}" height="300" fill="#fff"/>\n' + "\n".join(drawn) + "\n</svg>\n"
    )


def _place(gpu: int) -> tuple[int, int]:
    square, inside = divmod(gpu, 4)
    return 60 + 230 * square + 110 * (inside % 2), 60 + 110 * (inside // 2)


def _line(start: tuple[int, int], end: tuple[int, int], kind: str) -> str:
    (x1, y1), (x2, y2) = start, end
    # A bow beside GPUs of the same row, which would hide a straight line.
    far = y1 == y2 and abs(x2 - x1) > 120
    bend = (-1 if y1 < 100 else 1) * abs(x2 - x1) / 6 if far else 0
    middle = f"{(x1 + x2) / 2:g} {(y1 + y2) / 2 + bend:g}"
    return (
        f'<path d="M{x1} {y1} Q{middle} {x2} {y2}" fill="none" stroke="{_COLOURS[kind]}" '
        f'stroke-width="{3 if kind == "NV" else 1.5}"/>'
    )


def _legend(seen: Mapping[str, str]) -> list[str]:
    words = {
        "NV": "NVLink",
        "NODE": "PCIe, one socket",
        "PHB": "PCIe, one host bridge",
        "PIX": "PCIe, one switch",
        "SYS": "between sockets: not drawn",
    }
    drawn = []
    for row, (kind, link) in enumerate(sorted(seen.items())):
        y = 245 + 20 * row
        if kind != "SYS":
            drawn.append(f'<path d="M30 {y} H60" stroke="{_COLOURS[kind]}" stroke-width="3"/>')
        drawn.append(f'<text x="70" y="{y + 5}">{link}: {words[kind]}</text>')
    return drawn


BLOCKS: Mapping[str, Callable[[], str]] = {
    "accelerate": accelerate,
    "accuracy": accuracy,
    "choices": choices,
    "conversions": conversions,
    "costs": costs,
    **{f"costs-{name}": lambda name=name: costs((name,)) for name in _STRATEGIES},
    "deepspeed": deepspeed,
    **{f"step-{name}": lambda name=name: step(name) for name in _STRATEGIES},
    "fsdp1": fsdp1,
    "fsdp1-strategies": fsdp1_strategies,
    "imports": imports,
    "machines": machines,
    "measured": measured,
}


def generated() -> dict[Path, str]:
    """Return the text of every page and picture as it has to be."""
    made = {DOCS / "pictures" / f"{name}.svg": picture(name) for name in _PICTURES}
    for page in (ROOT / "README.md", *sorted(DOCS.rglob("*.md"))):
        text = page.read_text("utf-8")
        if _BLOCK.search(text):
            made[page] = _BLOCK.sub(lambda m: f"{m[1]}{BLOCKS[m[2]]()}{m[4]}", text)
    return made


def main() -> int:
    """Write what has changed, and name it."""
    for path, text in generated().items():
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
