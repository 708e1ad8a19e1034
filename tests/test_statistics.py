"""Intervals, tests and sample sizes against published tables and values worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preflight.task import statistics as stats


# Brown, Cai and DasGupta, Statistical Science 16 (2001), and the table in FACTS §14 (percent, rounded).
@pytest.mark.parametrize(
    ("k", "low", "high"),
    [(0, 0, 28), (1, 2, 40), (2, 6, 51), (3, 11, 60), (4, 17, 69), (5, 24, 76), (6, 31, 83), (10, 72, 100)],
)
def test_wilson_of_ten_samples_equals_the_published_table(k: int, low: int, high: int) -> None:
    found = stats.wilson(k, 10)
    assert [round(100 * edge) for edge in found] == [low, high]


def test_wilson_equals_newcombes_example() -> None:
    # Newcombe, Statistics in Medicine 17 (1998) 857, table I, method 3: 81/263 and 15/148.
    assert stats.wilson(81, 263) == (pytest.approx(0.2553, abs=5e-5), pytest.approx(0.3662, abs=5e-5))
    assert stats.wilson(15, 148) == (pytest.approx(0.0624, abs=5e-5), pytest.approx(0.1605, abs=5e-5))
    assert stats.wilson(0, 20) == (0.0, pytest.approx(0.1611, abs=5e-5))
    assert stats.wilson(1, 29) == (pytest.approx(0.0061, abs=5e-5), pytest.approx(0.1718, abs=5e-5))


def test_wilson_refuses_what_is_no_share() -> None:
    for k, n in ((-1, 10), (11, 10), (0, -1)):
        with pytest.raises(ValueError):
            stats.wilson(k, n)
    assert stats.wilson(0, 0) == (0.0, 1.0)


@given(st.integers(1, 3000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_holds_the_share_and_stays_inside_0_and_1(pair: tuple[int, int]) -> None:
    k, n = pair
    low, high = stats.wilson(k, n)
    assert 0 <= low <= k / n <= high <= 1
    wide_low, wide_high = stats.wilson(k, n, 0.99)
    assert wide_low <= low and high <= wide_high


@pytest.mark.parametrize(("n", "upper"), [(10, 0.2589), (20, 0.1391), (59, 0.0495), (100, 0.0295)])
def test_no_hit_still_allows_the_exact_upper_bound(n: int, upper: float) -> None:
    # 1 - 0.05 ** (1 / n), the exact form of the rule of three.
    assert stats.upper_bound(0, n) == pytest.approx(upper, abs=5e-5)


def test_exact_bounds_equal_clopper_pearson() -> None:
    # One-sided 97.5 % bounds are the two-sided 95 % interval: 4 of 10 gives 0.1216 to 0.7376.
    assert stats.lower_bound(4, 10, 0.975) == pytest.approx(0.1216, abs=5e-5)
    assert stats.upper_bound(4, 10, 0.975) == pytest.approx(0.7376, abs=5e-5)
    assert stats.lower_bound(0, 5) == 0.0 and stats.upper_bound(5, 5) == 1.0


def test_the_binomial_tail_equals_the_sum_by_hand() -> None:
    # Four throws of a fair coin: P(X >= 3) = 5/16.
    assert stats.binomial_at_least(3, 4, 0.5) == pytest.approx(5 / 16)
    assert stats.binomial_at_least(0, 4, 0.5) == 1.0
    assert stats.binomial_at_least(5, 4, 0.5) == 0.0
    assert stats.binomial_at_least(8, 19, 0.2) == pytest.approx(0.0233, abs=5e-5)


@pytest.mark.parametrize(
    ("first", "second", "p"),
    [(0, 5, 0.0625), (0, 6, 0.03125), (1, 9, 0.021484375), (3, 3, 1.0), (0, 0, 1.0), (2, 10, 0.038574219)],
)
def test_mcnemar_equals_the_exact_binomial(first: int, second: int, p: float) -> None:
    assert stats.mcnemar(first, second) == pytest.approx(p, abs=1e-8)
    assert stats.mcnemar(second, first) == pytest.approx(p, abs=1e-8)


def test_six_differing_samples_are_the_fewest_that_can_be_significant() -> None:
    assert stats.fewest_discordant() == 6


@pytest.mark.parametrize(("p0", "p1", "n", "right"), [(0.2, 0.5, 19, 8), (0.3, 0.5, 47, 21), (0.2, 0.3, 144, 39)])
def test_samples_to_separate_two_shares(p0: float, p1: float, n: int, right: int) -> None:
    assert stats.samples_to_separate(p0, p1) == (n, right)


def test_samples_to_separate_equals_aherns_table() -> None:
    # A'Hern, Statistics in Medicine 20 (2001) 859: p0 = 0.3, p1 = 0.5, alpha 0.05, power 0.8: 39 with 17.
    assert stats.samples_to_separate(0.3, 0.5, alpha=0.05) == (39, 17)


@pytest.mark.parametrize(("p0", "p1", "n"), [(0.3, 0.5, 93), (0.5, 0.6, 388)])
def test_samples_per_side_equal_the_published_sizes(p0: float, p1: float, n: int) -> None:
    assert stats.samples_per_side(p0, p1) == n
    assert stats.samples_per_side(p0, p0) is None


def test_half_width_of_ten_points_needs_84_samples() -> None:
    assert stats.samples_for_half_width(0.10, 0.35) == 84
    assert stats.samples_for_half_width(0.05, 0.35) == 347


def test_tiers_are_given_only_when_the_whole_interval_lies_inside() -> None:
    edges = (0.2, 0.5)
    assert [tier.name for tier in stats.tiers(edges)] == ["<20 %", "20-50 %", ">=50 %"]
    assert stats.tier_of(0, 10, edges) is None  # 0 to 28 %
    assert stats.tier_of(0, 16, edges).name == "<20 %"  # type: ignore[union-attr]
    assert stats.tier_of(18, 22, edges).name == ">=50 %"  # type: ignore[union-attr]
    assert stats.tier_of(11, 22, edges) is None
    assert stats.tier_of(35, 100, edges).name == "20-50 %"  # type: ignore[union-attr]
    assert stats.tier_of(0, 0, edges) is None


def test_the_samples_needed_for_a_tier_are_enough_and_one_less_is_not() -> None:
    # 0 of n: the upper end z²/(n + z²) falls below 20 % from n = 16 on (3.8415 / 19.8415 = 19.4 %; 15: 20.4 %).
    assert stats.samples_for_tier(0, 10, (0.2, 0.5)) == 16
    assert stats.samples_for_tier(5, 10, (0.2, 0.5)) is None  # exactly on an edge
    assert stats.samples_for_tier(0, 0, (0.2, 0.5)) is None


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_more_samples_at_the_same_share_settle_the_tier(pair: tuple[int, int]) -> None:
    k, n = pair
    needed = stats.samples_for_tier(k, n, (0.2, 0.5))
    if needed is None:
        assert k / n in (0.2, 0.5) or abs(k / n - 0.2) < 0.01 or abs(k / n - 0.5) < 0.01
        return
    low, high = stats.wilson(k / n * needed, needed)
    assert any(low >= tier.low and high < tier.high + (tier.high == 1.0) for tier in stats.tiers((0.2, 0.5)))


def test_quantiles_are_values_that_were_measured() -> None:
    ten = [float(value) for value in range(1, 11)]
    assert stats.quantile(ten, 0.95) == 10.0
    assert stats.quantile(ten, 0.5) == 5.0
    assert stats.quantile([float(value) for value in range(1, 21)], 0.95) == 19.0
    assert stats.quantile([7.0], 0.95) == 7.0
    assert stats.quantile([], 0.5) is None


def test_a_p95_bound_needs_59_values() -> None:
    assert stats.samples_to_cover(0.95, 0.95) == 59
    assert stats.quantile_bounds([float(v) for v in range(58)], 0.95)[1] is None
    assert stats.quantile_bounds([float(v) for v in range(59)], 0.95)[1] == 58.0
    assert stats.chance_that_maximum_covers(10) == pytest.approx(0.4013, abs=5e-5)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=200))
def test_quantile_bounds_enclose_the_quantile(values: list[float]) -> None:
    lower, upper = stats.quantile_bounds(values, 0.5)
    middle = stats.quantile(values, 0.5)
    assert middle is not None
    assert lower is None or lower <= middle
    assert upper is None or upper >= middle
    assert not any(bound is not None and math.isnan(bound) for bound in (lower, upper))
