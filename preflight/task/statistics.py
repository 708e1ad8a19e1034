"""How sure a share, a quantile or a comparison is: intervals, exact tests and the sample sizes they need.

Standard library only. Shares are fractions between 0 and 1. Sources: Wilson, JASA 22 (1927) 209; Clopper and Pearson,
Biometrika 26 (1934) 404; McNemar, Psychometrika 12 (1947) 153, in its exact (binomial) form.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

# Beyond this many samples the answer is "more than anyone collects for an exam".
MOST_SAMPLES = 100_000


@cache
def _z(confidence: float) -> float:
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def wilson(k: float, n: float, confidence: float = 0.95) -> tuple[float, float]:
    """The Wilson score interval of the share k/n, two-sided, without continuity correction; (0, 1) when n is 0.

    `k` need not be whole, so that sample sizes can be planned. Raises ValueError unless 0 <= k <= n.
    """
    if n < 0 or not 0 <= k <= n:
        raise ValueError(f"{k} of {n} is not a share")
    if n == 0:
        return 0.0, 1.0
    z = _z(confidence)
    share, z2n = k / n, z * z / n
    middle = (share + z2n / 2) / (1 + z2n)
    half = z / (1 + z2n) * math.sqrt(share * (1 - share) / n + z2n / (4 * n))
    # At the ends the exact value is 0 or 1; rounding would leave 1e-17 there.
    return (0.0 if k == 0 else max(0.0, middle - half)), (1.0 if k == n else min(1.0, middle + half))


def binomial_at_least(k: int, n: int, share: float) -> float:
    """P(X >= k) for X ~ Binomial(n, share)."""
    if k <= 0:
        return 1.0
    if k > n or share <= 0:
        return 0.0
    if share >= 1:
        return 1.0
    logs = math.log(share), math.log1p(-share)
    if k > (n + 1) * share:  # sum the shorter, smaller tail
        return min(1.0, math.fsum(_probability(i, n, logs) for i in range(k, n + 1)))
    return max(0.0, 1.0 - math.fsum(_probability(i, n, logs) for i in range(k)))


def _probability(i: int, n: int, logs: tuple[float, float]) -> float:
    combinations = math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1)
    return math.exp(combinations + i * logs[0] + (n - i) * logs[1])


def upper_bound(k: int, n: int, confidence: float = 0.95) -> float:
    """The exact one-sided upper bound of the share k/n (Clopper-Pearson): 0 of 10 still allows 26 %."""
    if k >= n:
        return 1.0
    # The largest share under which k or fewer hits still have probability 1 - confidence.
    return _bisect(lambda share: 1 - binomial_at_least(k + 1, n, share) > 1 - confidence)


def lower_bound(k: int, n: int, confidence: float = 0.95) -> float:
    """The exact one-sided lower bound of the share k/n (Clopper-Pearson)."""
    if k <= 0:
        return 0.0
    return _bisect(lambda share: binomial_at_least(k, n, share) < 1 - confidence)


def _bisect(still_below: Callable[[float], bool]) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if still_below(middle):
            low = middle
        else:
            high = middle
    return (low + high) / 2


def mcnemar(only_first: int, only_second: int) -> float:
    """The exact two-sided p-value that two runs over the same samples are equally good.

    `only_first` and `only_second` count the samples that just one of the runs got right. 1.0 when there are none.
    """
    discordant = only_first + only_second
    if discordant == 0:
        return 1.0
    return min(1.0, 2 * binomial_at_least(max(only_first, only_second), discordant, 0.5))


def fewest_discordant(alpha: float = 0.05) -> int:
    """The fewest samples on which two paired runs must differ before McNemar's exact test can see anything (6)."""
    n = 1
    while mcnemar(0, n) > alpha:
        n += 1
    return n


@dataclass(frozen=True)
class Tier:
    """One band of shares, `low` <= share < `high` (the last one includes 1)."""

    name: str
    low: float
    high: float


def tiers(edges: Sequence[float]) -> tuple[Tier, ...]:
    """The bands between the edges: (0.2, 0.5) gives "<20 %", "20-50 %", ">=50 %"."""
    points = [0.0, *edges, 1.0]
    made = []
    for low, high in itertools.pairwise(points):
        if low == 0.0:
            name = f"<{high * 100:g} %"
        elif high == 1.0:
            name = f">={low * 100:g} %"
        else:
            name = f"{low * 100:g}-{high * 100:g} %"
        made.append(Tier(name, low, high))
    return tuple(made)


def tier_of(k: int, n: int, edges: Sequence[float], confidence: float = 0.95) -> Tier | None:
    """The tier in which the whole Wilson interval of k/n lies, or None when it crosses an edge."""
    low, high = wilson(k, n, confidence)
    for tier in tiers(edges):
        if tier.low <= low and (high < tier.high or tier.high == 1.0):
            return tier
    return None


def samples_for_tier(k: int, n: int, edges: Sequence[float], confidence: float = 0.95) -> int | None:
    """About how many samples would put the whole interval into one tier if the share stayed at k/n.

    None when no number up to 100,000 would, as for a share that is exactly on an edge.
    """
    if n == 0:
        return None
    share = k / n

    def settled(size: int) -> bool:
        low, high = wilson(share * size, size, confidence)
        return any(tier.low <= low and (high < tier.high or tier.high == 1.0) for tier in tiers(edges))

    return _smallest(settled, n)


def samples_to_separate(p0: float, p1: float, alpha: float = 0.025, power: float = 0.8) -> tuple[int, int] | None:
    """(samples, right answers needed) of the smallest one-sided exact test of share <= p0 that finds p1 with `power`.

    The default alpha is one side of a two-sided 0.05: 0.2 against 0.5 needs 19 samples and 8 right ones.
    Source: the exact binomial test, as in A'Hern, Statistics in Medicine 20 (2001) 859.
    """
    for size in range(1, 5000):
        # The smallest count that would be too many under p0.
        needed = next((c for c in range(size + 1) if binomial_at_least(c, size, p0) <= alpha), None)
        if needed is not None and binomial_at_least(needed, size, p1) >= power:
            return size, needed
    return None


def samples_for_half_width(half_width: float, share: float, confidence: float = 0.95) -> int | None:
    """Samples after which the Wilson interval of `share` is at most `half_width` to each side on average."""

    def narrow(size: int) -> bool:
        low, high = wilson(share * size, size, confidence)
        return (high - low) / 2 <= half_width

    return _smallest(narrow, 1)


def samples_per_side(p0: float, p1: float, alpha: float = 0.05, power: float = 0.8) -> int | None:
    """Samples per side to tell two unpaired shares apart, two-sided (normal approximation, Fleiss 1981, pooled).

    None when the shares are equal. Paired runs (the same samples twice) need fewer.
    """
    if p0 == p1:
        return None
    mean = (p0 + p1) / 2
    za, zb = NormalDist().inv_cdf(1 - alpha / 2), NormalDist().inv_cdf(power)
    root = za * math.sqrt(2 * mean * (1 - mean)) + zb * math.sqrt(p0 * (1 - p0) + p1 * (1 - p1))
    return math.ceil(root * root / (p1 - p0) ** 2)


def _smallest(holds: Callable[[int], bool], start: int) -> int | None:
    """The smallest whole number from `start` on for which `holds` is true, found by doubling and halving."""
    high = max(1, start)
    while not holds(high):
        high *= 2
        if high > MOST_SAMPLES:
            return None
    low = high // 2
    while low + 1 < high:
        middle = (low + high) // 2
        if middle >= start and holds(middle):
            high = middle
        else:
            low = middle
    return high


def quantile(values: Sequence[float], q: float) -> float | None:
    """The nearest-rank quantile: the smallest value that at least the share q of the values does not exceed.

    None for no values. For ten values the 0.95 quantile is the largest one.
    """
    if not values:
        return None
    ordered = sorted(values)
    # The small term keeps 0.95 * 20 = 19.000000000000004 at rank 19.
    return ordered[max(1, math.ceil(q * len(ordered) - 1e-9)) - 1]


def quantile_bounds(values: Sequence[float], q: float, confidence: float = 0.95) -> tuple[float | None, float | None]:
    """One-sided bounds of the q-quantile, free of distribution, each with `confidence`; None where n is too small.

    An upper bound of the 0.95 quantile at 95 % needs 59 values.
    Source: David and Nagaraja, Order Statistics (2003), §7.1.
    """
    ordered, n = sorted(values), len(values)
    lower = upper = None
    # x(r) <= quantile holds when at least r values lie below it: P(B >= r), B ~ Binomial(n, q).
    for rank in range(n, 0, -1):
        if binomial_at_least(rank, n, q) >= confidence:
            lower = ordered[rank - 1]
            break
    # x(r) >= quantile holds when fewer than r values lie below it: P(B <= r - 1).
    for rank in range(1, n + 1):
        if 1 - binomial_at_least(rank, n, q) >= confidence:
            upper = ordered[rank - 1]
            break
    return lower, upper


def chance_that_maximum_covers(n: int, q: float = 0.95) -> float:
    """The probability that the largest of n values reaches the true q-quantile: 0.40 for 10 values and q = 0.95."""
    return 1 - q**n


def samples_to_cover(q: float = 0.95, confidence: float = 0.95) -> int:
    """Values needed so that their maximum is an upper bound of the q-quantile with `confidence` (59 for 0.95)."""
    # The small term guards the exact powers: q**n == 1 - confidence counts as enough.
    return math.ceil(math.log(1 - confidence) / math.log(q) - 1e-9)
