"""`distft.parity`: one model under many strategies against one process, and a certificate of it."""

from __future__ import annotations

import importlib.metadata
import pickle
import platform
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import distft
from distft.diagnose.certificate import Certificate, StrategyResult
from distft.diagnose.one_strategy import StrategyRun
from distft.diagnose.recipe import (
    BuildModel,
    CannotBuild,
    FromConfig,
    MakeBatches,
    Recipe,
    without_zeros,
)
from distft.diagnose.reference import Built, train_reference
from distft.diagnose.shrink import Shrink
from distft.spec import Workload, config_values
from distft.strategies.base import Strategy
from distft.strategies.ddp import DDP
from distft.strategies.fsdp import FSDP2, HSDP
from distft.strategies.parallel import EP, TP, NDParallel
from distft.strategies.zero import ZeRO1, ZeRO2
from distft.strategies.zero3 import ZeRO3
from distft.testing.pool import RanksFailed, WorkerPool

if TYPE_CHECKING:
    from distft.training.optimizers import OptimizerFactory
    from distft.training.step import CountFunction, LossFunction

# One row of 16 tokens shows what 4096 show, and trains in milliseconds.
MAX_LENGTH = 16
MAX_ROWS = 2
PACKAGES = ("torch", "transformers", "peft", "deepspeed", "bitsandbytes")


def every_strategy(world_size: int) -> tuple[Strategy, ...]:
    """Return the ten strategies that ``"all"`` means; on an odd number of ranks those without 2.

    >>> len(every_strategy(4))
    10

    Collective: none.
    """
    found = [DDP(), ZeRO1(), ZeRO2(), ZeRO3(), FSDP2(), EP()]
    if world_size % 2:
        return (*found, TP())
    return (
        *found,
        HSDP(dp_replicate=2),
        TP(tp=2),
        NDParallel(tp=2, ep=2),
        NDParallel(dp_replicate=2, tp=2) if world_size % 4 == 0 else TP(),
    )


def parity(
    build_model: BuildModel | str | Path,
    strategies: str | Strategy | Iterable[Strategy] = "all",
    world_size: int = 4,
    workload: Workload | None = None,
    *,
    peft_config: Any = None,
    batches: MakeBatches | None = None,
    loss_fn: LossFunction | None = None,
    count_fn: CountFunction | None = None,
    optimizer: OptimizerFactory | None = None,
    num_steps: int = 3,
    shrink: bool = True,
    timeout: float = 120.0,
    pool: WorkerPool | None = None,
) -> Certificate:
    """Return a certificate of whether strategies train a model as one process does, in fp32.

    It starts gloo ranks of its own on this machine; no GPU and no weights are needed. Each strategy
    starts from other values on every rank but 0, makes ``num_steps`` steps of AdamW with unequal
    loss tokens and a bound on the norm, saves, and loads what it and every other strategy that
    passed has saved. Compared with one process: weights and buffers after `apply`, loss (1e-6
    relative), every gradient (1e-5 relative, or 1e-7 of the whole gradient), norm (1e-5), weights
    (1e-5 absolute), moments in the files (2e-5 relative), weights after each load, and loss and
    weights of one more step. A strategy that cannot spread this model is not applicable; one that
    raises, hangs or loses a rank fails, and the others go on.

    Args:
        build_model: A function at the top level of a module that returns the model, with its
            adapters and quantization; or a folder with ``config.json``, or a name of
            `distft.presets`. transformers models that it builds or loads get fewer layers and
            narrower ones, and drawn weights: the same code, classes, adapters and quantization.
        strategies: ``"all"``, or strategies.
        world_size: Number of ranks; a multiple of 4 has room for every product of axes.
        workload: Of a model built from a config also what is trained: ``tuning="lora"`` attaches
            adapters of its rank and targets. Rows and lengths are cut to 2 and 16.
        peft_config: A ``peft.LoraConfig`` that strategies attach.
        batches: From a step to the micro-batches of all ranks, their number divisible by
            ``world_size``; default rows of random tokens.
        loss_fn: As `Strategy.train_step` takes it, at the top level of a module.
        count_fn: As `Strategy.train_step` takes it.
        optimizer: Factory of an optimizer; default ``AdamW(lr=1e-3, eps=1e-5)``.
        num_steps: Optimizer steps before the save, at least 2.
        shrink: Whether to cut configs; without, the model is built as it is.
        timeout: Seconds that a strategy may take to train, or to load.
        pool: Ranks that run already.

    Raises:
        ValueError: ``build_model`` is no function that ranks can find, raises or does not train in
            one process, or another argument is wrong.

    Collective: none; it starts ranks of its own.
    """
    began = time.monotonic()
    chosen = _chosen(strategies, world_size)
    if num_steps < 2:
        raise ValueError(
            f"parity(num_steps={num_steps}) needs at least 2 steps: the first is made of pieces, "
            "the others by train_step. Leave it out."
        )
    load = workload or Workload(seq_len=MAX_LENGTH)
    adapters = without_zeros(peft_config if peft_config is not None else _adapters(load))
    recipe = Recipe(
        builder=_pickled(build_model, "build_model"),
        shrink=Shrink(world_size) if shrink else None,
        # Two for each rank, so that every strategy has a micro-step that is not the last.
        num_micro_batches=2 * world_size,
        peft_config=adapters,
        rows=min(load.micro_batch, MAX_ROWS),
        length=min(load.seq_len, MAX_LENGTH),
        num_steps=num_steps,
        make_batches=batches,
        loss_fn=loss_fn,
        count_fn=count_fn,
        optimizer=optimizer,
    )
    for name, function in (("batches", batches), ("loss_fn", loss_fn), ("count_fn", count_fn)):
        _pickled(function, name)
    if pool is not None:
        built, results = _run(pool, recipe, chosen, timeout)
    else:
        # A rank that waits at the door of a save alone says so before the time-out of all.
        env = {"DISTFT_RENDEZVOUS_TIMEOUT": "15"}
        with WorkerPool(world_size, timeout=max(timeout, 300.0), env=env) as started:
            built, results = _run(started, recipe, chosen, timeout)
    return Certificate(
        built.model,
        built.num_parameters,
        built.digest,
        built.cut,
        "" if adapters is None else _described(adapters),
        world_size,
        num_steps,
        results,
        _versions(),
        round(time.monotonic() - began, 1),
    )


def _run(
    pool: WorkerPool, recipe: Recipe, strategies: Sequence[Strategy], timeout: float
) -> tuple[Built, tuple[StrategyResult, ...]]:
    with tempfile.TemporaryDirectory(prefix="distft-parity-") as name:
        folder = Path(name)
        recipe, built = _build(pool, recipe, folder)
        runs = [
            StrategyRun(strategy, recipe, folder, folder / f"saved-{index}", timeout)
            for index, strategy in enumerate(strategies)
        ]
        for run in runs:
            run.train(pool)
        for run in runs:
            # Its own first: what it wrote itself before what others wrote.
            run.load(pool, [run, *(other for other in runs if other is not run)])
        return built, tuple(run.result() for run in runs)


def _build(pool: WorkerPool, recipe: Recipe, folder: Path) -> tuple[Recipe, Built]:
    """Return the recipe whose model can be built, as narrow as it may be, and what it built."""
    attempts = [recipe]
    if recipe.shrink is not None:
        # A family whose widths depend on one another in its own way keeps them.
        attempts.append(replace(recipe, shrink=replace(recipe.shrink, widths=False)))
    errors: list[str] = []
    for attempt in attempts:
        try:
            return attempt, pool.run(train_reference, attempt, folder)[0]
        except RanksFailed as error:
            cause = error.errors[0]
            errors.append(str(cause) if isinstance(cause, CannotBuild) else str(error))
    raise ValueError(errors[0])


def _chosen(
    strategies: str | Strategy | Iterable[Strategy], world_size: int
) -> tuple[Strategy, ...]:
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 2:
        raise ValueError(f"parity(world_size={world_size!r}) needs an integer of at least 2 ranks.")
    if isinstance(strategies, str):
        if strategies != "all":
            raise ValueError(
                f"parity(strategies={strategies!r}) takes 'all' or a list of strategies such as "
                "[FSDP2(), TP(tp=2)]; distft.strategy makes one from its name."
            )
        return every_strategy(world_size)
    chosen = (strategies,) if isinstance(strategies, Strategy) else tuple(strategies)
    wrong = [one for one in chosen if not isinstance(one, Strategy)]
    if wrong or not chosen:
        raise ValueError(
            f"parity() got {len(chosen)} strategies, {len(wrong)} of which are none"
            f"{f', such as {wrong[0]!r}' if wrong else ''}. Pass instances such as [FSDP2()]."
        )
    for strategy in chosen:
        if strategy.precision != "fp32":
            raise ValueError(
                f"parity() got {strategy!r}, and bf16 cannot tell a fault of 1 % from rounding. "
                "Pass the strategy with precision='fp32'."
            )
    return chosen


def _pickled(function: Any, name: str) -> bytes:
    """Return what ranks find a function by; a folder or a name becomes one first."""
    if isinstance(function, (str, Path)):
        function = FromConfig(dict(config_values(function)))
    elif name == "build_model" and (
        not callable(function) or hasattr(function, "named_parameters")
    ):
        raise ValueError(
            f"parity(build_model={type(function).__name__}) takes a function that returns the "
            "model, a folder with config.json, or a model's name. A model that is built already "
            "cannot be made small: pass what builds it."
        )
    try:
        return pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"parity({name}=...) is not found by other processes: {error}. Define it with `def` "
            "at the top level of a module, not inside a function and not as a lambda."
        ) from error


def _adapters(load: Workload) -> Any:
    """Return the adapters that a workload trains; None where it trains everything."""
    if load.tuning == "full":
        return None
    if load.tuning != "lora" or load.expert_lora_rank is not None:
        raise ValueError(
            f"parity(workload={load}) makes adapters of tuning='lora' without expert_lora_rank. "
            "For others pass a build_model with its quantization, and peft_config=."
        )
    from peft import LoraConfig

    targets: Any = load.lora_targets
    targets = targets if isinstance(targets, str) else list(targets)
    return LoraConfig(
        r=load.lora_rank,
        lora_alpha=2 * load.lora_rank,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )


def _described(config: Any) -> str:
    targets = config.target_modules
    named = targets if isinstance(targets, str) else ", ".join(sorted(targets or ()))
    return f"{type(config).__name__}(r={config.r}) on {named or 'parameters'}"


def _versions() -> dict[str, str]:
    found = {"distft": distft.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
