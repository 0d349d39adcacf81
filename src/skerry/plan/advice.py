"""What to set, and what contradicts what, in plain words; every rule follows from a line of the core or of the plan.

Suggestions change as little as possible: what is configured stays where it works. First a smaller codec (not below
int4: what is coarser costs quality that nobody has planned for), then a longer H; links and the syncer are planned to
be busy for ROOM of the time at most. P = H, as far as there are tensors: one fragment a step is the smoothest traffic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from skerry import config as configs
from skerry.algo.codecs import payload_bytes
from skerry.algo.fragments import BLOCK
from skerry.core.schedule import WARM
from skerry.plan.bandwidth import periods
from skerry.plan.syncs import Plan, Stretch, Sync, sizes_of, stretch
from skerry.plan.units import size

ROOM = 0.8
NARROWER: dict[str, configs.Codec] = {"fp32": "bf16", "bf16": "int8", "int8": "int4"}
EVEN = 4 / 3  # largest fragment over the mean: more than a balanced split can help
LONG_JOIN_S = 600.0
MANY = 10**8  # parameters, from which recorded contributions fill a disk


def suggest(plan: Plan, stretches: Sequence[Stretch]) -> dict[str, Any]:
    """Configuration keys with values that fit, and why, where they are not the configured ones."""
    sync, wire = plan.config.sync, plan.config.wire
    up, down = wire.codec_up, wire.codec_down
    first, steady = stretches[0], stretches[-1]
    while _link_steps(plan, steady, up, down) > ROOM * sync.sync_every and (up in NARROWER or down in NARROWER):
        if _bytes(up) >= _bytes(down):
            up = NARROWER[up]
        else:
            down = NARROWER[down]
    every = _every(sync.sync_every, plan, steady, up, down)
    warm_every = sync.warm_every
    if first.period.phase == WARM:
        warm_every = min(every, _every(sync.warm_every, plan, first, up, down))
    chosen: dict[str, Any] = {
        "sync.num_fragments": min(every, len(plan.layout.tensors)),
        "sync.sync_every": every,
        "sync.warm_every": warm_every,
        "sync.fragment_sync_delay": sync.fragment_sync_delay,
        "sync.quorum": _quorum(plan),
        "wire.codec_up": up,
        "wire.codec_down": down,
    }
    chosen["sync.fragment_sync_delay"] = _delay(_with(plan, chosen))
    return chosen | {"why": list(_why(plan, chosen))}


def _bytes(codec: str) -> int:
    return payload_bytes(codec, BLOCK)


def _link_steps(plan: Plan, at: Stretch, up: str, down: str) -> float:
    """Steps in which the link of the quorum's slowest member carries every fragment once, with these codecs."""
    wire = plan.config.wire
    wider = max(_bytes(up), _bytes(down)) / max(_bytes(wire.codec_up), _bytes(wire.codec_down))
    return at.bounds["links"] * wider / plan.step_s


def _every(configured: int, plan: Plan, at: Stretch, up: str, down: str) -> int:
    """The least H, from the configured one up, at which links and syncer have room."""
    steps = max(_link_steps(plan, at, up, down), at.bounds["syncer"] / plan.step_s)
    return max(configured, math.ceil(steps / ROOM))


def _quorum(plan: Plan) -> int | float:
    """What is configured, unless so many never keep pace: then as many as do."""
    fastest = min(i.step_s for i in plan.islands)
    paced = sum(i.step_s <= 2 * fastest for i in plan.islands)
    return plan.config.sync.quorum if plan.quorum <= paced else paced


def _delay(plan: Plan) -> int:
    """tau, from the configured one up, under which the syncs of a quorum fit once the warm phase is over."""
    sizes = sizes_of(plan)
    steady = stretch(plan, sizes, periods(plan.config.sync)[-1])
    steps = sorted(s.sync_s / s.island.step_s for s in steady.syncs)[plan.quorum - 1]
    return min(plan.config.sync.sync_every, max(plan.config.sync.fragment_sync_delay, math.ceil(steps)))


def _with(plan: Plan, chosen: dict[str, Any]) -> Plan:
    return plan._replace(config=configs.resolve(plan.config, None, chosen.items()))


def _why(plan: Plan, chosen: dict[str, Any]) -> Iterator[str]:
    reasons = {
        "sync.num_fragments": "one fragment a step is the smoothest traffic, as far as there are tensors",
        "sync.sync_every": f"the least at which links and syncer are busy no more than {ROOM:.0%} of the time",
        "sync.warm_every": "the warm phase, too, must get through",
        "sync.fragment_sync_delay": "the syncs of a quorum fit under it",
        "sync.quorum": "so many learners step at half the best pace or more",
        "wire.codec_up": "the links of a quorum cannot carry more in time",
        "wire.codec_down": "the links of a quorum cannot carry more in time",
    }
    configured = msgspec.to_builtins(plan.config)
    for key, reason in reasons.items():
        table, name = key.split(".")
        if chosen[key] != configured[table][name]:
            yield f"{key} = {chosen[key]}, not {configured[table][name]}: {reason}"


# ---------------------------------------------------------------------------------------------- contradictions


def warnings(plan: Plan, sizes: Sequence[int], stretches: Sequence[Stretch]) -> list[str]:
    return [*_of_config(plan, sizes), *_of_fragments(plan, sizes), *_of_syncs(plan, stretches), *_of_ends(plan, sizes)]


def _of_config(plan: Plan, sizes: Sequence[int]) -> Iterator[str]:
    c, slowest = plan.config, max(i.step_s for i in plan.islands)
    rtt = max(i.rtt_s for i in plan.islands)
    if slowest >= c.sync.stall_s:
        yield (
            f"a step takes {slowest:g} s but sync.stall_s = {c.sync.stall_s:g}: that learner counts as stalled in "
            "every step and never for the quorum; raise sync.stall_s to several steps"
        )
    if c.wire.timeout_s <= c.wire.heartbeat_s:
        yield (
            f"wire.timeout_s = {c.wire.timeout_s:g} is not above wire.heartbeat_s = {c.wire.heartbeat_s:g}: "
            "a quiet link is cut before its heartbeat comes"
        )
    if rtt >= c.wire.timeout_s:
        yield f"a round trip takes {rtt:g} s, as long as wire.timeout_s = {c.wire.timeout_s:g}: links are cut as dead"
    if c.sync.policy == "warm" and c.sync.warm_every > c.sync.sync_every:
        yield (
            f"sync.warm_every = {c.sync.warm_every} is above sync.sync_every = {c.sync.sync_every}: "
            "the warm phase synchronises no more often than the rest"
        )
    if c.run.steps and c.run.steps < c.sync.sync_every:
        yield (
            f"run.steps = {c.run.steps} is less than sync.sync_every = {c.sync.sync_every}: "
            "most fragments are merged only once, at the end"
        )
    one = len(plan.islands) * payload_bytes(c.wire.codec_up, max(sizes))
    if one > c.wire.held_bytes_max:
        yield (
            f"one fragment of all learners is {size(one)}, more than wire.held_bytes_max = "
            f"{size(c.wire.held_bytes_max)}: rounds wait for each other; raise it or sync.num_fragments"
        )
    if c.learner.step_s and any(i.step_s < c.learner.step_s for i in plan.islands):
        yield f"learner.step_s = {c.learner.step_s:g} pads every step to that: the faster ones given here cannot be"


def _of_fragments(plan: Plan, sizes: Sequence[int]) -> Iterator[str]:
    asked, tensors = plan.config.sync.num_fragments, plan.layout.tensors
    if asked > len(tensors):
        yield (
            f"sync.num_fragments = {asked}, but the model has {len(tensors)} tensors and a tensor is never cut: "
            f"there will be {len(sizes)} fragments"
        )
    biggest = max(tensors, key=lambda t: t.size)
    if max(sizes) > EVEN * sum(sizes) / len(sizes):
        share = max(sizes) * len(sizes) / sum(sizes)
        yield (
            f"{biggest.name} ({biggest.size:,} parameters) makes one fragment {share:.1f} times the mean: links must "
            "carry that peak; fewer fragments would be evener"
        )


def _of_syncs(plan: Plan, stretches: Sequence[Stretch]) -> Iterator[str]:
    tau = plan.config.sync.fragment_sync_delay
    hardest = {at.period.phase: at for at in reversed(stretches)}  # the first of each phase: H only grows in it
    for at in reversed(hardest.values()):
        where = f"in the {at.period.phase} phase (H = {at.period.sync_every})"
        if late := [s for s in at.syncs if not s.fits]:
            worst = max(late, key=lambda s: s.sync_s / s.island.step_s)
            yield (
                f"{where} a sync does not fit under sync.fragment_sync_delay = {tau} steps for {_names(late)}: "
                f"it takes up to {worst.sync_s / worst.island.step_s:.1f} steps ({worst.sync_s:.3g} s); nobody waits, "
                "but the versions adopted are that old"
            )
        if at.period_s > 1.05 * at.bounds["steps"]:
            yield f"{where} H becomes {at.period_s / plan.step_s:.0f} at least: {_reason(at, plan)}"
        if stale := [s for s in at.syncs if s.behind > plan.config.sync.stale_versions_max]:
            yield (
                f"{where} {_names(stale)} cannot keep up: {stale[0].behind:.0f} versions pass while the model "
                f"comes in, more than sync.stale_versions_max = {plan.config.sync.stale_versions_max}, so all of that "
                "work is given up; a longer H, a smaller codec or a better link is needed"
            )
        slow = [s for s in at.syncs if s.behind and s not in stale]
        if slow:
            yield f"{where} {_names(slow)} gets whole fragments, not deltas: its link is too slow for every version"


def _reason(at: Stretch, plan: Plan) -> str:
    return {
        "links": f"the links of {plan.quorum} learners, the quorum, carry the model no faster",
        "syncer": "the syncer merges and writes no faster (an estimate: one busy core)",
        "rounds": f"only {at.rounds} rounds may be open at once and each waits that long for its quorum",
    }[at.limit]


def _of_ends(plan: Plan, sizes: Sequence[int]) -> Iterator[str]:
    c, whole = plan.config, 32 * sum(sizes)
    if late := [i for i in plan.islands if whole / plan.rate(i) > c.sync.close_timeout_s]:
        needed = max(whole / plan.rate(i) for i in late)
        yield (
            f"at the end the last work goes up in float32, which takes {', '.join(i.name for i in late)} up to "
            f"{needed:,.0f} s, but sync.close_timeout_s = {c.sync.close_timeout_s:g}: it would be lost; "
            f"set it to {math.ceil(2 * needed)}"
        )
    slow = {i.name: whole / plan.rate(i) for i in plan.islands if whole / plan.rate(i) > LONG_JOIN_S}
    if slow:
        yield f"{', '.join(slow)} needs {max(slow.values()) / 60:,.0f} minutes to load the model at each start"
    if plan.failures and any(whole / plan.rate(i) >= plan.failures.every_s for i in plan.islands):
        yield "some learner fails more often than it can load the model: it adds nothing"
    if c.store.record == "full" and sum(sizes) > MANY:
        yield 'store.record = "full" keeps every contribution for good: see the disk it takes in an hour'


def _names(syncs: Sequence[Sync]) -> str:
    names = [s.island.name for s in syncs]
    return ", ".join(names) if len(names) <= 4 else f"{len(names)} learners ({names[0]} to {names[-1]})"
