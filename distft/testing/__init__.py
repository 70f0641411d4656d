"""What tests of distributed training need: real ranks, tiny models, checks for any strategy."""

from distft.testing import simulate
from distft.testing.checks import CHECKS, check_strategy
from distft.testing.models import TINY_MODELS, tiny_batches, tiny_config, tiny_model
from distft.testing.pool import RanksFailed, RanksTimedOut, WorkerPool

__all__ = [
    "CHECKS",
    "TINY_MODELS",
    "RanksFailed",
    "RanksTimedOut",
    "WorkerPool",
    "check_strategy",
    "simulate",
    "tiny_batches",
    "tiny_config",
    "tiny_model",
]
