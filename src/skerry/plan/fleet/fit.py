"""How the constants were found: `python -m skerry.plan.fleet.fit` searches, and writes `calibration.json` beside this
file.

Least squares over the 60 cells of Table 1, in points, where what a cell lies beyond LIMIT counts many times over: the
aim is every cell within 3 points, and a fit of the mean alone gives one of them up. The search moves one constant at a
time by a share of it, keeps what is better and halves a step that is not; all simulations draw the same random numbers,
so that two sets of constants can be told apart. The slice (256 chips) and the shape of the repair delay are not fitted:
only the mean share of missing slices, slice x repair / MTBI, shows in the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from skerry.plan.fleet.fleet import REPAIR_POWER, REPAIR_SHAPE, Costs
from skerry.plan.fleet.paper import Cell, deviations, table_1

RECORD = Path(__file__).with_name("calibration.json")
START = Costs(step_s=7.0, restart_s=82.0, reconfigure_s=11.4, repair_s=2400.0)  # by hand, from single rows of the table
MOVES = {"step_s": 0.05, "restart_s": 0.01, "reconfigure_s": 0.01, "repair_s": 0.05}  # first, as shares
ROUNDS = 6
LIMIT, FORCE = 2.75, 300.0
NUDGE = 0.1  # by which each constant is moved to see what hangs on it


def misfit(cells: list[Cell]) -> float:
    beyond = sum(max(0.0, abs(cell.deviation) - LIMIT) ** 2 for cell in cells)
    return (sum(cell.deviation**2 for cell in cells) + FORCE * beyond) / len(cells)


Compute = Callable[[Costs], list[Cell]]


def fit(
    start: Costs = START, rounds: int = ROUNDS, told: Callable[[str], None] = print, compute: Compute = table_1
) -> Costs:
    moves = dict(MOVES)
    best, least = start, misfit(compute(start))
    for _ in range(rounds):
        for name in moves:
            before = best
            for factor in (1 + moves[name], 1 / (1 + moves[name])):
                while (value := misfit(compute(moved := scaled(best, name, factor)))) < least:
                    best, least = moved, value
            if best == before:
                moves[name] /= 2
        told(f"{least:.3f} {best}")
    return best


def scaled(costs: Costs, name: str, factor: float) -> Costs:
    changes: dict[str, Any] = {name: getattr(costs, name) * factor}
    return replace(costs, **changes)


def rounded(costs: Costs) -> Costs:
    """Four digits: more would say more than the table does."""
    return Costs(*(float(f"{getattr(costs, field.name):.4g}") for field in fields(Costs)))


def sensitivity(costs: Costs) -> dict[str, dict[str, Any]]:
    """Each constant a tenth up and down: the deviations then, and how far the mean goodput of the cells moves."""
    found: dict[str, dict[str, Any]] = {}
    middle = table_1(costs)
    for name in MOVES:
        moved = {}
        for word, factor in (("up", 1 + NUDGE), ("down", 1 - NUDGE)):
            cells = table_1(scaled(costs, name, factor))
            largest, mean = deviations(cells)
            shifts = [new.ours - old.ours for new, old in zip(cells, middle, strict=True)]
            farthest = max(shifts) if max(shifts) > -min(shifts) else min(shifts)
            moved[word] = {
                "deviation_max": round(largest, 2), "deviation_mean": round(mean, 2),
                "shift_mean": round(sum(shifts) / len(shifts), 2), "shift_max": round(farthest, 2),
            }  # fmt: skip
        found[name] = moved
    return found


def record(costs: Costs) -> dict[str, Any]:
    cells = table_1(costs)
    largest, mean = deviations(cells)
    return {
        "about": "constants of the goodput model, fitted to Table 1 of arXiv 2604.21428 by skerry.plan.fleet.fit",
        "constants": asdict(costs),
        "not_fitted": {"slice_chips": 256, "repair_power": REPAIR_POWER, "repair_shape": REPAIR_SHAPE},
        "deviation_max": round(largest, 2),
        "deviation_mean": round(mean, 2),
        "residuals": [
            {"mode": c.mode, "learners": c.learners, "chips": c.chips, "what": c.what, "paper": c.paper,
             "deviation": round(c.deviation, 2)} for c in cells
        ],
        "sensitivity": sensitivity(costs),
    }  # fmt: skip


def read_record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text())
    return found


def main() -> None:
    RECORD.write_text(json.dumps(record(rounded(fit())), indent=1) + "\n")


if __name__ == "__main__":
    main()
