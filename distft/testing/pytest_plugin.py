"""pytest fixture ``distft_parity``: a test of one's own repository that strategies train alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from distft.diagnose.certificate import Certificate
    from distft.testing.pool import WorkerPool


@pytest.fixture(scope="session")
def _distft_pools() -> Iterator[dict[int, WorkerPool]]:
    """Keep ranks between tests, by their number."""
    started: dict[int, WorkerPool] = {}
    yield started
    for pool in started.values():
        pool.close()


@pytest.fixture
def distft_parity(_distft_pools: dict[int, WorkerPool]) -> Callable[..., Certificate]:
    """Return `distft.parity` as an assertion: the test fails with what differs first.

    Ranks are started once for all tests. ``build_model`` and what else ranks call lie at the top
    level of a module that can be imported, the test's own file among them.
    """

    def check(
        build_model: Any, strategies: Any = "all", world_size: int = 2, *more: Any, **options: Any
    ) -> Certificate:
        from distft.diagnose.parity import parity
        from distft.testing.pool import WorkerPool

        __tracebackhide__ = True
        pool = options.pop("pool", None)
        if pool is None:
            if world_size not in _distft_pools:
                env = {"DISTFT_RENDEZVOUS_TIMEOUT": "15"}
                _distft_pools[world_size] = WorkerPool(world_size, env=env)
            pool = _distft_pools[world_size]
        certificate = parity(build_model, strategies, world_size, *more, pool=pool, **options)
        if not certificate.passed:
            pytest.fail(str(certificate), pytrace=False)
        return certificate

    return check
