"""The gradient's norm as arithmetic, without ranks."""

from __future__ import annotations

import torch

from distft.training.clip import GradientShards, global_norm


def test_the_norm_of_a_long_vector_on_a_cpu_does_not_fall_short():
    vector = torch.randn(10_000_000, generator=torch.Generator().manual_seed(0))
    exact = float(vector.double().square().sum().sqrt())
    found = float(global_norm([GradientShards([vector])], "cpu"))
    assert abs(found / exact - 1) < 1e-6
    # What torch adds up in one go; where this fails, no vector need be divided.
    assert abs(float(torch._foreach_norm([vector], 2.0)[0]) / exact - 1) > 1e-4


def test_a_norm_is_that_of_all_parts_whole_or_divided():
    parts = [torch.full((3, 50_000), 2.0), torch.full((4,), 3.0), torch.zeros(0)]
    found = float(global_norm([GradientShards(parts)], "cpu"))
    assert abs(found - (600_000 + 36) ** 0.5) < 1e-3
