from __future__ import annotations

import random

from trace_lightning.report.series import MAX_POINTS, Series


def noisy(count: int) -> Series:
    rng = random.Random(1)
    return Series([float(i) for i in range(count)], [rng.random() for _ in range(count)])


def test_every_extreme_of_a_stretch_survives() -> None:
    series = noisy(10_000)
    series.values[7321], series.values[7322] = 9.0, -9.0
    thin = series.thinned()
    assert 900 < len(thin) <= MAX_POINTS
    points = dict(zip(thin.steps, thin.values, strict=True))
    assert (points[7321], points[7322]) == (9.0, -9.0)
    assert {0.0, 9999.0} <= points.keys()
    assert thin.steps == sorted(thin.steps)
    assert all(series.values[int(step)] == value for step, value in points.items())  # measured, where it was measured


def test_short_curves_are_whole() -> None:
    series = noisy(MAX_POINTS)
    assert series.thinned() is series
    assert len(noisy(MAX_POINTS + 1).thinned()) <= MAX_POINTS


def test_areas_keep_their_sum() -> None:
    series = noisy(10_000)
    thin = series.averaged(500)
    assert len(thin) == 500
    assert abs(20 * sum(thin.values) - sum(series.values)) < 1e-6
