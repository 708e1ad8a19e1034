"""How far off is each kind of evidence, on measurements that nobody fitted? Read from facts/memory_errors.json."""

from __future__ import annotations

from preflight import facts
from preflight.plan import Plan


def interval(evidence: str, plan: Plan, allocated: int, reserved: int | None = None) -> tuple[int, int, int]:
    """(low, high, reserved): bounds of the allocated and of the reserved peak, and the expected reserved peak.

    All in bytes. `low` is the allocated peak less the 95th percentile of this evidence's own error; `high` the
    reserved one plus its.
    Without a reserved figure of its own the evidence takes the ratio seen on published rows with both figures.
    """
    table = facts.table("memory_errors")["evidence"][evidence]
    row = table["methods"].get(plan.method) or table["all"]
    expected = reserved if reserved is not None else int(allocated * table["reserved_over_allocated"])
    low = int(allocated * (1 - row["allocated_p95_pct"] / 100))
    high = int(max(expected, allocated) * (1 + row["reserved_p95_pct"] / 100))
    return low, high, expected
