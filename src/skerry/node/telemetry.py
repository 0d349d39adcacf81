"""What a syncer shows of itself: one plain record of where everything stands, for tables, files and people."""

from __future__ import annotations

from typing import Any

from skerry.core.ledger import Totals
from skerry.core.syncer import SyncerMachine


def status(machine: SyncerMachine, bytes_in: int, bytes_out: int, wall: float) -> dict[str, Any]:
    """The syncer's position and each learner's, as numbers and short words."""
    state = machine.state
    return {
        "run": state.created.run,
        "at": wall,
        "epoch": state.epoch,
        "phase": machine.stage if state.phase == "training" else state.phase,
        "progress": machine.progress,
        "elapsed_s": machine.elapsed_s,
        "merges": state.merges,
        "contributors_mean": state.contributors / state.merges if state.merges else 0.0,
        "rounds_open": len(machine.rounds.open),
        "waiting": machine.waiting,
        "sync_every": machine.sync_every,
        "versions": [f.version for f in state.fragments],
        "tokens": tokens(state.ledger.totals(), len(state.fragments)),
        "refused": dict(sorted(machine.refused.items())),
        "ahead": dict(sorted(machine.ahead.items())),
        "bytes_in": bytes_in,
        "bytes_out": bytes_out,
        "learners": {name: _member(machine, name) for name in sorted(machine.members)},
    }


def tokens(totals: Totals, fragment_count: int) -> dict[str, Any]:
    """Tokens as people count them: the ledger's sums divided by the number of fragments."""
    return {
        "produced": totals.produced / fragment_count,
        "merged": totals.merged / fragment_count,
        "pending": totals.pending / fragment_count,
        "discarded": {reason: n / fragment_count for reason, n in totals.discarded.items()},
    }


def _member(machine: SyncerMachine, name: str) -> dict[str, Any]:
    member, report = machine.members[name], machine.members[name].report
    unsettled = [report.tokens - p.mark_tokens for p in report.positions] if report else [0]
    marks = [report.step - p.mark_step for p in report.positions] if report else [0]
    return {
        "life": member.life,
        "state": member.state(machine.clock.now, machine.config.sync.stall_s),
        "step": member.step,
        "tokens": report.tokens if report else 0,
        "tokens_per_s": _rate(machine, name),
        "step_s": member.step_s or 0.0,
        "step_gap_s_max": report.step_gap_s_max if report else 0.0,
        "unmerged_steps": max(marks),
        "unsettled_tokens": sum(unsettled),  # by the learner's own marks, in tokens x fragments
        "loss": report.loss if report else 0.0,
        "fast_forwards": report.fast_forwards if report else 0,
    }


def _rate(machine: SyncerMachine, name: str) -> float:
    member = machine.members[name]
    report = member.report
    if report is None or not report.step or not member.step_s:
        return 0.0
    return report.tokens / report.step / member.step_s
