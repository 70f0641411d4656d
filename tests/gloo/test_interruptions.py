"""Runs that a signal ends at any step go on with the exact sequence."""

from __future__ import annotations

import shutil

import pytest

import distft
from distft import DDP, FSDP2, ZeRO2, ZeRO3
from distft.testing import RanksFailed
from tests.gloo.interruption_jobs import EVERY, STEPS, Interruption, run

STRATEGIES = (FSDP2(), DDP(), ZeRO3(), ZeRO2())
LOGGED = ("loss", "grad_norm", "learning_rate", "num_tokens", "mean_token_accuracy", "entropy")
QUICK = 3


def logged(history):
    return [{k: entry[k] for k in LOGGED} for entry in history if "loss" in entry]


@pytest.fixture(scope="module")
def uninterrupted(pools, tmp_path_factory):
    """Return the log of a whole run under a strategy, made when it is first asked for."""
    found = {}

    def of(strategy):
        if strategy not in found:
            folder = tmp_path_factory.mktemp("whole")
            found[strategy] = logged(pools(2).run(run, folder, strategy, None)[0])
            shutil.rmtree(folder)
        return found[strategy]

    return of


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=() if n < QUICK else pytest.mark.slow) for n in range(20)]
)
def test_a_run_that_a_signal_ended_goes_on_with_the_exact_sequence(
    pools, tmp_path, uninterrupted, seed
):
    strategy = STRATEGIES[seed % len(STRATEGIES)]
    interruption = Interruption.of_seed(seed, ranks=2)
    expected = uninterrupted(strategy)
    assert len(expected) == STEPS
    if interruption.kind == "saves":
        history = pools(2).run(run, tmp_path, strategy, interruption)[0]
        # Every rank saved after the step at hand, and stopped; at its end it is the next one's.
        last = min(interruption.step + 1 + (interruption.moment == "on_step_end"), STEPS)
        assert len(logged(history)) == last
        assert distft.latest(tmp_path).name == f"checkpoint-{last}"
    else:
        with pytest.raises(RanksFailed):
            pools(2).run(run, tmp_path, strategy, interruption)
        # A kill at the end of a step comes before its save.
        saved = interruption.step // EVERY * EVERY
        found = distft.latest(tmp_path)
        assert (found and found.name) == (f"checkpoint-{saved}" if saved else None)
    history = pools(2).run(run, tmp_path, strategy, None)[0]
    assert logged(history) == expected
