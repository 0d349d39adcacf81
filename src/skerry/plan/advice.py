"""What to set, and what contradicts what, in plain words.

Every rule follows from a line of the core or of the plan; two about the model from what was measured (docs/QUALITY.md).

Suggestions change as little as possible: what is configured stays where it works. First a smaller codec (not below
int4: what is coarser costs quality that nobody has planned for), then a longer H; links and the syncer are planned to
be busy for ROOM of the time at most, and a quorum's round is to be over within H. P = H, as far as the model can be
split and, where P is to follow its size, into large fragments: one a step is the smoothest traffic. Nothing is
suggested that `config.validate` would refuse, nor an H that the run is too short for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from skerry import config as configs
from skerry.algo.codecs import payload_bytes
from skerry.algo.fragments import BLOCK, BY_SIZE, LARGE, fragment_count, fragments_max, fragments_wanted
from skerry.plan.bandwidth import Period, periods
from skerry.plan.syncs import Island, RunPlan, Stretch, Sync, sizes_of, stretch
from skerry.text import counted, size

ROOM = 0.8
NARROWER: dict[str, configs.Codec] = {"fp32": "bf16", "bf16": "int8", "int8": "int4"}
EVEN = 4 / 3  # largest fragment over the mean: more than a balanced split of whole tensors can help
GROUPS_MAX = 4  # of learners that can carry the same H, named in one line
ABOVE = 1.05  # times the configured H: what is beyond it is said
LONG_JOIN_S = 600.0
STEPS_OVER_M = 600  # from which models were level with data-parallel
LATE = 3  # steps that a sync takes, from which overwriting gave the better model
MANY = 10**8  # parameters, from which recorded contributions fill a disk
EVERY_MAX = int(configs.most("sync.sync_every"))
FRAGMENTS_MAX = int(configs.most("sync.num_fragments"))
CLOSE_S_MAX = configs.most("sync.close_timeout_s")


def suggest(plan: RunPlan, stretches: Sequence[Stretch]) -> dict[str, Any]:
    """Configuration keys with values that fit, and why, where they are not the configured ones; {} where none would.

    It is the quorum that they fit: `why` ends with who is left out. H is reckoned with all else that is suggested, so
    that a plan of what is suggested suggests the same.
    """
    sync, first, steady = plan.config.sync, stretches[0], stretches[-1]
    shaped = _shaped(plan, steady)
    if not is_carried(plan, steady) or _beyond(plan, shaped):
        return {}
    every, warm_every = _every(shaped, steady.period, sync.sync_every), sync.warm_every
    if first.period.stage == "warm":
        warm_every = min(every, _every(shaped, first.period, sync.warm_every))
    chosen: dict[str, Any] = {
        "sync.num_fragments": _asked_for(plan, shaped.config.sync.num_fragments, every),
        "sync.sync_every": every,
        "sync.warm_every": warm_every,
        "sync.fragment_sync_delay": sync.fragment_sync_delay,
        "sync.quorum": shaped.config.sync.quorum,
        "wire.codec_up": shaped.config.wire.codec_up,
        "wire.codec_down": shaped.config.wire.codec_down,
    }
    chosen["sync.fragment_sync_delay"] = _delay(_with(plan, chosen))
    return chosen | {"why": [*_why(plan, chosen), *_left_out(_with(plan, chosen))]}


def is_carried(plan: RunPlan, steady: Stretch) -> bool:
    """Whether there is an H at which links and syncer have room, with codecs as narrow as it takes."""
    return _carried(plan, steady, *_codecs(plan, steady)) <= EVERY_MAX


def _shaped(plan: RunPlan, steady: Stretch) -> RunPlan:
    """The plan with the quorum, the codecs and the number of fragments that are suggested."""
    up, down = _codecs(plan, steady)
    paced = _with(plan, {"sync.quorum": _quorum(plan), "wire.codec_up": up, "wire.codec_down": down})
    return _with(paced, {"sync.num_fragments": _fragments(paced, steady.period)})


def _fragments(plan: RunPlan, steady: Period) -> int:
    """As many as are configured, where they and H work; else one a step, as far as the model can be split."""
    sync, most = plan.config.sync, _fragments_most(plan)
    if sync.num_fragments and _every(plan, steady, sync.sync_every) == sync.sync_every:
        return min(sync.num_fragments, most)
    return min(_least(plan, stretch(plan, sizes_of(plan), steady), sync.sync_every), most)


def _fragments_most(plan: RunPlan) -> int:
    """As many as the model can be split into; unless a number is configured none too small, or those by size."""
    sync, parameters = plan.config.sync, plan.layout.param_count
    most = min(fragments_max(plan.layout, sync.cut_tensors), FRAGMENTS_MAX)
    if sync.num_fragments:
        return most
    by_size = fragments_wanted(parameters, 0)
    return min(most, parameters // LARGE if by_size == max(BY_SIZE) else by_size)


def _asked_for(plan: RunPlan, fragments: int, every: int) -> int:
    """This number, or 0 where that is configured and comes to the same, also with this H."""
    is_same = fragments == _by_size(plan) == min(every, _fragments_most(plan))
    return 0 if not plan.config.sync.num_fragments and is_same else fragments


def _by_size(plan: RunPlan) -> int:
    return fragment_count(plan.layout, 0, plan.config.sync.cut_tensors)


def _codecs(plan: RunPlan, at: Stretch) -> tuple[configs.Codec, configs.Codec]:
    """Up and down: the configured ones, or as narrow as the links ask for."""
    up, down = plan.config.wire.codec_up, plan.config.wire.codec_down
    room = ROOM * plan.config.sync.sync_every
    while _link_steps(plan, at, up, down) > room and (up in NARROWER or down in NARROWER):
        if _bytes(up) >= _bytes(down):
            up = NARROWER[up]
        else:
            down = NARROWER[down]
    return up, down


def _bytes(codec: str) -> int:
    return payload_bytes(codec, BLOCK)


def _link_steps(plan: RunPlan, at: Stretch, up: str, down: str) -> float:
    """Steps in which the link of the quorum's slowest member carries every fragment once, with these codecs."""
    wire = plan.config.wire
    wider = max(_bytes(up), _bytes(down)) / max(_bytes(wire.codec_up), _bytes(wire.codec_down))
    return at.bounds["links"] * wider / plan.pace_s


def _every(plan: RunPlan, period: Period, configured: int) -> int:
    """The least H, from the configured one up, at which links and syncer have room and a quorum's round is over."""
    sizes = sizes_of(plan)
    least = _least(plan, stretch(plan, sizes, period), configured)
    round_s = stretch(plan, sizes, period._replace(sync_every=least)).bounds["trips"]
    return max(least, min(EVERY_MAX, math.ceil(round_s / plan.pace_s)))


def _least(plan: RunPlan, at: Stretch, configured: int) -> int:
    """The least H, from the configured one up, at which links and syncer have room."""
    wire = plan.config.wire
    return max(configured, min(EVERY_MAX, _carried(plan, at, wire.codec_up, wire.codec_down)))


def _beyond(plan: RunPlan, shaped: RunPlan) -> int:
    """The least H at which it works, if the run ends before it; else 0."""
    if not (steps := math.ceil(_steps(plan))):
        return 0
    every = _every(shaped, periods(plan.config)[-1], min(plan.config.sync.sync_every, steps))
    return every if every > steps else 0


def _steps(plan: RunPlan) -> float:
    """Of the run; 0: not known, as nobody knows how many tokens are in a step."""
    return plan.config.run.steps or 60 * plan.config.run.minutes / plan.pace_s


def _carried(plan: RunPlan, at: Stretch, up: str, down: str) -> int:
    """The least H at which links and syncer have room."""
    return math.ceil(max(_busy_steps(plan, at, up, down).values()) / ROOM)


def _busy_steps(plan: RunPlan, at: Stretch, up: str, down: str) -> dict[str, float]:
    return {"links": _link_steps(plan, at, up, down), "syncer": at.bounds["syncer"] / plan.pace_s}


def _quorum(plan: RunPlan) -> int | float:
    """What is configured, unless so many never keep pace: then as many as do."""
    fastest = min(i.step_s for i in plan.islands)
    paced = sum(i.step_s <= 2 * fastest for i in plan.islands)
    return plan.config.sync.quorum if plan.quorum <= paced else paced


def _delay(plan: RunPlan) -> int:
    """tau, from the configured one up, under which the syncs of a quorum fit once the warm phase is over."""
    sizes = sizes_of(plan)
    steady = stretch(plan, sizes, periods(plan.config)[-1])
    steps = math.ceil(_quorum_steps(plan, steady))
    return min(plan.config.sync.sync_every, max(plan.config.sync.fragment_sync_delay, steps))


def _quorum_steps(plan: RunPlan, at: Stretch) -> float:
    """Steps in which the syncs of a quorum are through."""
    return sorted(sync.steps for sync in at.syncs)[plan.quorum - 1]


def _with(plan: RunPlan, chosen: dict[str, Any]) -> RunPlan:
    return plan._replace(config=configs.resolve(plan.config, None, chosen.items()))


def _why(plan: RunPlan, chosen: dict[str, Any]) -> Iterator[str]:
    is_longest = chosen["sync.fragment_sync_delay"] == chosen["sync.sync_every"]
    reasons = {
        "sync.num_fragments": "one fragment a step is the smoothest traffic, as far as the model can be split",
        "sync.sync_every": f"the least in which a round fits; links and syncer are busy {ROOM:.0%} of the time at most",
        "sync.warm_every": "the warm phase, too, must get through",
        "sync.fragment_sync_delay": "as long as H allows" if is_longest else "the syncs of a quorum fit under it",
        "sync.quorum": "so many learners step at half the best pace or more",
        "wire.codec_up": "the links of a quorum cannot carry more in time",
        "wire.codec_down": "the links of a quorum cannot carry more in time",
    }
    configured = msgspec.to_builtins(plan.config)
    for key, reason in reasons.items():
        table, name = key.split(".")
        if chosen[key] != configured[table][name]:
            was = configured[table][name] or f"the {_by_size(plan)} that follow from its size"
            yield f"{key} = {chosen[key]}, not {was}: {reason}"


def _left_out(plan: RunPlan) -> Iterator[str]:
    if stale := _stale(plan, stretch(plan, sizes_of(plan), periods(plan.config)[-1])):
        work = "its work is" if len(stale) == 1 else "their work is"
        yield (
            f"{_names(stale)} cannot keep up with this either, and all of {work} given up: what is suggested is "
            f"for {counted(plan.quorum, 'learner')}, the quorum"
        )


def _stale(plan: RunPlan, at: Stretch) -> list[Sync]:
    """Those that give up all of their work."""
    return [sync for sync in at.syncs if sync.behind > plan.config.sync.stale_versions_max]


# ---------------------------------------------------------------------------------------------- contradictions


def warnings(plan: RunPlan, sizes: Sequence[int], stretches: Sequence[Stretch]) -> list[str]:
    return [
        *_of_limits(plan, stretches[-1]),
        *_of_length(plan, stretches),
        *_of_config(plan, sizes),
        *_of_fragments(plan, sizes),
        *_of_syncs(plan, stretches),
        *_of_ends(plan, sizes),
        *_of_quality(plan, stretches[-1]),
    ]


def _of_limits(plan: RunPlan, steady: Stretch) -> Iterator[str]:
    if is_carried(plan, steady):
        return
    up, down = _codecs(plan, steady)
    every = _carried(plan, steady, up, down)
    busy = _busy_steps(plan, steady, up, down)
    who = max(busy, key=lambda name: busy[name])
    what = {
        "links": f"the links of {counted(plan.quorum, 'learner')}, the quorum, cannot carry this model",
        "syncer": f"one syncer cannot merge this model so fast (an estimate: {_workers(plan)})",
    }[who]
    faster = f"{every / EVERY_MAX:.3g} times as"
    remedy = {"links": f"links {faster} fast, ", "syncer": f"{faster} many merge.threads, "}[who]
    yield (
        f"{what}: with codecs {up} up and {down} down, once through takes {busy[who]:,.0f} steps "
        f"({busy[who] * plan.pace_s / 86400:.3g} days), and sync.sync_every is {EVERY_MAX:,} at most; no goodput is "
        f"expected and nothing suggested: it needs {remedy}longer steps or a smaller model"
    )


def _of_length(plan: RunPlan, stretches: Sequence[Stretch]) -> Iterator[str]:
    """A run that is over before its fragments were merged, by its H or by what becomes of that."""
    run, first, steps = plan.config.run, stretches[0], _steps(plan)
    length = f"run.steps = {run.steps}" if run.steps else f"run.minutes = {run.minutes:g}, {steps:,.0f} steps,"
    if is_carried(plan, stretches[-1]) and (every := _beyond(plan, shaped := _shaped(plan, stretches[-1]))):
        wire, at = shaped.config.wire, stretch(shaped, sizes_of(shaped), first.period._replace(sync_every=1))
        faster = f"{every / math.ceil(steps):.3g} times as"
        remedy = {
            "links": f"links {faster} fast",
            "syncer": f"{faster} many merge.threads",
            "trips": "a shorter way to the syncer",
        }[at.limit]
        yield (
            f"{length} is too short for these links: with codecs {wire.codec_up} up and {wire.codec_down} down the "
            f"least H that works is {every:,} ({_reason(at, shaped)}), so nothing is suggested; it takes {remedy}, "
            f"longer steps, a smaller model or a run of {every:,} steps and more"
        )
    if 0 < steps < (really := max(first.period.sync_every, first.period_s / plan.pace_s)):
        becomes = " as it becomes" if really > first.period.sync_every else ""
        yield (
            f"{length} is less than H = {really:,.0f}{becomes} in the {first.period.stage} phase: "
            "most fragments are merged only once, at the end"
        )


def _of_config(plan: RunPlan, sizes: Sequence[int]) -> Iterator[str]:
    c, slowest = plan.config, max(i.step_s for i in plan.islands)
    rtt = max(i.rtt_s for i in plan.islands)
    if slowest >= c.sync.stall_s:
        yield (
            f"a step takes {slowest:g} s but sync.stall_s = {c.sync.stall_s:g}: that learner counts as stalled in "
            "every step and never for the quorum; raise sync.stall_s to several steps"
        )
    if rtt >= c.wire.timeout_s:
        yield f"a round trip takes {rtt:g} s, as long as wire.timeout_s = {c.wire.timeout_s:g}: links are cut as dead"
    if c.sync.policy == "auto" and c.sync.warm_every > c.sync.sync_every:
        yield (
            f"sync.warm_every = {c.sync.warm_every} is above sync.sync_every = {c.sync.sync_every}: "
            "the warm phase synchronises no more often than the rest"
        )
    one = len(plan.islands) * payload_bytes(c.wire.codec_up, max(sizes))
    if one > c.wire.held_bytes_max:
        yield (
            f"one fragment of all learners is {size(one)}, more than wire.held_bytes_max = "
            f"{size(c.wire.held_bytes_max)}: rounds wait for each other; raise it, or "
            f"sync.num_fragments above {len(sizes)}"
        )
    if c.learner.step_s and any(i.step_s < c.learner.step_s for i in plan.islands):
        yield f"learner.step_s = {c.learner.step_s:g} pads every step to that: the faster ones given here cannot be"


def _of_fragments(plan: RunPlan, sizes: Sequence[int]) -> Iterator[str]:
    sync, tensors = plan.config.sync, plan.layout.tensors
    if sync.num_fragments > len(sizes):
        many = counted(plan.layout.param_count, "parameter") if sync.cut_tensors else counted(len(tensors), "tensor")
        why = f"a fragment has {BLOCK} at least" if sync.cut_tensors else "with sync.cut_tensors = false none is cut"
        yield (
            f"sync.num_fragments = {sync.num_fragments}, but the model has {many} and {why}: "
            f"there will be {counted(len(sizes), 'fragment')}"
        )
    biggest, share = max(tensors, key=lambda t: t.size), max(sizes) * len(sizes) / sum(sizes)
    if share > EVEN and not sync.cut_tensors:
        yield (
            f"{biggest.name} ({biggest.size:,} parameters) makes one fragment {share:.1f} times the mean: links must "
            "carry that peak; sync.cut_tensors = true would cut it"
        )


def _of_syncs(plan: RunPlan, stretches: Sequence[Stretch]) -> Iterator[str]:
    tau = plan.config.sync.fragment_sync_delay
    hardest = {at.period.stage: at for at in reversed(stretches)}  # the first of each phase: H only grows in it
    for at in reversed(hardest.values()):
        where = f"in the {at.period.stage} phase (H = {at.period.sync_every})"
        if late := [s for s in at.syncs if not s.fits]:
            worst = max(late, key=lambda s: s.steps)
            yield (
                f"{where} a sync does not fit under sync.fragment_sync_delay = {tau} steps for {_names(late)}: "
                f"it takes up to {worst.steps:.1f} steps ({worst.sync_s:.3g} s); nobody waits, but the versions "
                "adopted are that old"
            )
        if any(s.carried_s > ABOVE * at.bounds["steps"] for s in at.syncs):
            yield f"{where} {_cannot_carry(plan, at)}"
        if at.period_s > ABOVE * at.bounds["steps"]:
            yield f"{where} H becomes {at.period_s / plan.pace_s:,.0f} at least: {_reason(at, plan)}"
        if stale := _stale(plan, at):
            yield (
                f"{where} {_names(stale)} cannot keep up: {stale[0].behind:.0f} versions pass while the model "
                f"comes in, more than sync.stale_versions_max = {plan.config.sync.stale_versions_max}, so all of that "
                "work is given up; a longer H, a smaller codec or a better link is needed"
            )
        if slow := [s for s in at.syncs if s.behind and s not in stale]:
            get = "gets" if len(slow) == 1 else "get"
            yield f"{where} {_names(slow)} {get} whole fragments, not deltas: too slow a link for every version"


def _cannot_carry(plan: RunPlan, at: Stretch) -> str:
    """Whose links cannot, the H that each can, and what to do."""
    by_every: dict[int, list[Sync]] = {}
    for sync in at.syncs:
        if sync.carried_s > ABOVE * at.bounds["steps"]:
            by_every.setdefault(math.ceil(sync.carried_s / plan.pace_s), []).append(sync)
    can = max(by_every)
    short, worst = sum(map(len, by_every.values())), max(by_every[can], key=lambda s: s.carried_s)
    each = [f"{_names(alike)} can carry H = {every:,}" for every, alike in sorted(by_every.items())]
    if len(each) > GROUPS_MAX:
        each = [each[0], f"{short - len(by_every[min(by_every)])} others more, up to H = {can:,}"]
    key = "sync.warm_every" if at.period.stage == "warm" else "sync.sync_every"
    remedies = ([f"{key} = {can:,}"] if can <= EVERY_MAX else []) + _remedies(plan, at, worst)
    links = "a link" if short == 1 else f"{short} links"
    return (
        f"{links} cannot carry H = {at.period.sync_every}: {', '.join(each)} (there the whole model one way takes "
        f"{worst.cycle_s:.3g} s, a round {worst.round_s:.3g} s, {worst.transfer_s:.3g} s of it on the link); "
        f"it takes {' or '.join(remedies)}"
    )


def _remedies(plan: RunPlan, at: Stretch, worst: Sync) -> list[str]:
    """Beside a longer H: what makes the larger part of this learner's delay smaller."""
    others_s = worst.round_s - worst.transfer_s
    if worst.cycle_s < worst.round_s and worst.transfer_s < others_s:
        return ["a shorter way to the syncer"]
    wire = plan.config.wire
    name, codec = max(("up", wire.codec_up), ("down", wire.codec_down), key=lambda way: _bytes(way[1]))
    narrower = [f"wire.codec_{name} = {NARROWER[codec]}"] if codec in NARROWER else []
    left_s = at.bounds["steps"] - others_s  # for what is on the link, if a round is to be over within H
    if left_s <= 0:
        return [*narrower, "a faster link"]
    times = max(worst.load, worst.transfer_s / left_s)
    return [*narrower, f"links of {times * plan.rate(worst.island) / 1e6:.3g} Mbit/s"]


def _reason(at: Stretch, plan: RunPlan) -> str:
    return {
        "links": f"the links of {counted(plan.quorum, 'learner')}, the quorum, carry the model no faster",
        "syncer": f"the syncer merges and writes no faster (an estimate: {_workers(plan)})",
        "trips": f"a round, there and back, takes {counted(plan.quorum, 'learner')}, the quorum, that long",
    }[at.limit]


def _workers(plan: RunPlan) -> str:
    return f"merge.threads = {plan.config.merge.threads}"


def _of_ends(plan: RunPlan, sizes: Sequence[int]) -> Iterator[str]:
    c, whole = plan.config, 32 * sum(sizes)
    if late := [i for i in plan.islands if whole / plan.rate(i) > c.sync.close_timeout_s]:
        needed = max(whole / plan.rate(i) for i in late)
        enough = math.ceil(2 * needed)
        remedy = (
            f"set it to {enough}" if enough <= CLOSE_S_MAX else f"it is {CLOSE_S_MAX:,} at most, which is too short"
        )
        yield (
            f"at the end the last work goes up in float32, which takes {_named(late)} up to "
            f"{needed:,.0f} s, but sync.close_timeout_s = {c.sync.close_timeout_s:g}: it would be lost; {remedy}"
        )
    if slow := [i for i in plan.islands if whole / plan.rate(i) > LONG_JOIN_S]:
        need = "needs" if len(slow) == 1 else "need"
        longest = max(whole / plan.rate(i) for i in slow)
        yield f"{_named(slow)} {need} {longest / 60:,.0f} minutes to load the model at each start"
    if plan.failures and any(whole / plan.rate(i) >= plan.failures.every_s for i in plan.islands):
        yield "some learner fails more often than it can load the model: it adds nothing"
    if c.store.record == "full" and sum(sizes) > MANY:
        yield 'store.record = "full" keeps every contribution for good: see the disk it takes in an hour'


def _of_quality(plan: RunPlan, steady: Stretch) -> Iterator[str]:
    learners, steps = len(plan.islands), _steps(plan)
    if learners > 1 and 0 < steps < STEPS_OVER_M * learners:
        yield (
            f"{learners} learners want {STEPS_OVER_M * learners:,} steps or more, {STEPS_OVER_M} times their number, "
            f"to end level with data-parallel training (measured at 10M parameters); this run has {steps:,.0f}"
        )
    late = _quorum_steps(plan, steady)
    if late > LATE and plan.config.learner.adopt == "rebase":
        yield (
            f"a sync takes {counted(plan.quorum, 'learner')}, the quorum, {late:.1f} steps: where it takes more than "
            f'{LATE}, learner.adopt = "overwrite" may give the better model, for work that it throws away'
        )


def _names(syncs: Sequence[Sync]) -> str:
    return _named([s.island for s in syncs])


def _named(islands: Sequence[Island]) -> str:
    names = [island.name for island in islands]
    return ", ".join(names) if len(names) <= 4 else f"{len(names)} learners ({names[0]} to {names[-1]})"
