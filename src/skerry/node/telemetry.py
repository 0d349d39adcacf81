"""What a syncer shows of itself: one plain record of where everything stands, for tables, files and people.

It is made twice a second beside everything else, so it costs a sum over what each learner last said and no more. What
nobody serves at present has a record of the same shape, from its tape alone; so has a learner that has not come
back to a syncer since that began.
"""

from __future__ import annotations

from typing import Any

from skerry import config as configs
from skerry.core.ledger import Account, Totals
from skerry.core.messages import Report
from skerry.core.schedule import over_budget, stage_of, sync_every_in
from skerry.core.state import RunState
from skerry.core.syncer import SyncerMachine

BEHIND_NAMED = 3  # learners that are called by name


def status(machine: SyncerMachine, bytes_in: int, bytes_out: int, wall: float) -> dict[str, Any]:
    """The syncer's position and each learner's, as numbers and short words."""
    return _run(machine.state, machine.config, wall) | {
        "elapsed_s": machine.elapsed_s,
        "rounds_open": len(machine.rounds.open),
        "waiting": machine.waiting,
        "sync_every": machine.sync_every,
        "sync_every_configured": machine.sync_every_configured,
        "sync_every_reached": machine.rounds.reached or 0.0,
        "behind": _behind(machine),
        "quorum": machine.quorum,
        "ready": len(machine.roster.ready),
        "refused": dict(sorted(machine.refused.items())),
        "ahead": {learner: ahead.why for learner, ahead in sorted(machine.ahead.items())},
        "bytes_in": bytes_in,
        "bytes_out": bytes_out,
        "learners": _learners(machine),
    }


def _learners(machine: SyncerMachine) -> dict[str, Any]:
    """Whom this syncer has met, and who was there before it began and is yet to come back."""
    state, members = machine.state, machine.members
    absent = [name for name in state.lives if name not in members and _gone(state, name) == "away"]
    return {
        name: _member(machine, name) if name in members else _on_tape(state, name)
        for name in sorted([*members, *absent])
    }


def recorded(state: RunState, wall: float) -> dict[str, Any]:
    """The same of a run that nobody serves, as far as its tape says; `wall` is when that was last written to."""
    config, learners = configs.decode(state.config), {name: _on_tape(state, name) for name in sorted(state.lives)}
    return _run(state, config, wall) | {"elapsed_s": state.elapsed_s, "learners": learners}


def _on_tape(state: RunState, name: str) -> dict[str, Any]:
    """A learner of whom nobody here has heard; to look at it opens no account."""
    life, ledger = state.lives[name].life, state.ledger
    account, before = ledger.accounts.get(f"{name}/{life}", Account([])), ledger.before(name, life)
    return {
        "life": life,
        "state": _gone(state, name),
        "step": account.step,
        "steps": before.steps + account.step,
        "tokens": before.tokens + account.tokens,
        "unsettled_tokens": sum(account.tokens - at.tokens for at in account.settled) / max(1, len(account.settled)),
        "bytes_up": account.bytes_up,
        "bytes_down": account.bytes_down,
    }


def _gone(state: RunState, name: str) -> str:
    """What a learner is that nobody serves: it has left if nothing of its work is left to be merged."""
    known, ledger = state.lives[name], state.ledger
    if known.is_over or name in state.dropped:
        return "expelled"
    if state.phase == "closed":
        return "finished"
    has_left = ledger.is_settled(name, known.life) and ledger.has_worked(name, known.life)
    return "left" if has_left else "away"


def _run(state: RunState, config: configs.Config, wall: float) -> dict[str, Any]:
    stage = stage_of(config, state)
    run = config.run
    budget = {"minutes": run.minutes, "tokens": run.tokens, "steps": run.steps * run.learners}
    return {
        "run": state.created.run,
        "at": wall,
        "epoch": state.epoch,
        "phase": stage if state.phase == "training" else state.phase,
        "progress": state.progress,
        "budget": {unit: n for unit, n in budget.items() if n},
        "over_budget": over_budget(run, state.ledger),  # in the same unit
        "merges": state.merges,
        "contributors_mean": state.contributors / state.merges if state.merges else 0.0,
        "sync_every": sync_every_in(config.sync, stage),
        "versions": [f.version for f in state.fragments],
        "tokens": tokens(state.ledger.sums(), len(state.fragments)),
        "orders": state.orders,  # of the operator's, so far
        "dropped": sorted(state.dropped),  # learners that they keep out
        "finishing": state.is_finishing,
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
    before = machine.state.ledger.before(name, member.life)  # in earlier lives
    return {
        "life": member.life,
        "state": member.state(machine.clock.now, machine.config.sync.stall_s),
        "step": member.step,
        "steps": before.steps + member.step,
        "tokens": before.tokens + (report.tokens if report else 0),
        "tokens_per_s": _rate(machine, name),
        "step_s": member.step_s or 0.0,
        "step_gap_s_max": report.step_gap_s_max if report else 0.0,
        "round_steps": member.round_steps or 0.0,  # from a snapshot to the version that has it
        "unmerged_steps": _unmerged_steps(report) if report else 0,
        "unsettled_tokens": _unsettled_tokens(report) if report else 0,
        "loss": report.loss if report else 0.0,
        "fast_forwards": report.fast_forwards if report else 0,
        "bytes_up": report.bytes_up if report else 0,
        "bytes_down": report.bytes_down if report else 0,
        "heard_s": machine.clock.now - member.reported_at if report else None,  # since its last report
    }


def _behind(machine: SyncerMachine) -> str:
    """Who cannot keep the configured H, in one sentence; empty where everyone can."""
    every = machine.sync_every_configured
    slow = {name: m.round_steps for name, m in machine.roster.ready.items() if (m.round_steps or 0.0) > every}
    if not slow:
        return ""
    worst = sorted(slow, key=lambda name: (-(slow[name] or 0.0), name))[:BEHIND_NAMED]
    named = ", ".join(f"{name} ({slow[name]:.0f} steps)" for name in worst)
    more = f" and {len(slow) - len(worst)} more" if len(slow) > len(worst) else ""
    return (
        f"a round takes longer than H = {every} for {named}{more}: their links{_caps(machine.config.wire)}, or this "
        f"syncer, cannot carry it; H = {machine.sync_every} is asked for"
    )


def _caps(wire: configs.Wire) -> str:
    """What the run itself lets a link carry at most."""
    bounds = {"wire.mbit_max_up": wire.mbit_max_up, "wire.mbit_max_down": wire.mbit_max_down}
    said = " and ".join(f"{key} = {mbit:g}" for key, mbit in bounds.items() if mbit)
    return f" (which {said} bounds)" if said else ""


def _unmerged_steps(report: Report) -> int:
    """Since the oldest of its fragments was settled, by the learner's own marks."""
    return report.step - min(at.mark_step for at in report.positions)


def _unsettled_tokens(report: Report) -> float:
    """By the learner's own marks, as people count tokens: the mean over its fragments."""
    count = len(report.positions)
    return (count * report.tokens - sum(at.mark_tokens for at in report.positions)) / count


def _rate(machine: SyncerMachine, name: str) -> float:
    member = machine.members[name]
    report = member.report
    if report is None or not report.step or not member.step_s:
        return 0.0
    return report.tokens / report.step / member.step_s
