"""What a seed draws: the run's configuration, who takes part, the weather, and which faults strike.

Each seed takes its own subset of fault kinds (swarm testing): what hides when everything happens at once shows when
only two things do.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from skerry import config as configs
from skerry.core.flow import WINDOW_BYTES
from skerry.proof.chaos.plan import Fault, FaultPlan, schedule
from skerry.proof.sim.algebra import BYTES

KINDS = (
    "kill",  # a learner's process dies and comes back as a new life
    "crash",  # the syncer's process dies
    "power",  # ... and with it what the disk had not made durable
    "crash at write",  # it dies at one of its next file operations
    "disk",  # EIO or ENOSPC at one of its next file operations
    "cut",  # a connection breaks
    "partition",  # nothing passes between one learner and the syncer
    "half-open",  # one direction only
    "swizzle",  # links are blocked one by one and freed in another order
    "corrupt",  # a bit of a frame is flipped
    "truncate",  # a frame breaks off
    "pause",  # a learner stands still
    "freeze",  # the syncer does
    "jump",  # somebody's clocks jump
    "take over",  # a second process under the same name, with that name's key or, where there are none, without
    "second syncer",  # on the same directory
    "spoil",  # a learner's parameters become NaN
    "leave",  # a learner goes, with a word
)
INTERRUPT = "interrupt"  # the operator ends the syncer's process in order, and starts it again
CODECS: tuple[configs.Codec, ...] = ("fp32", "bf16", "int8", "int4")
INT2_SHARE = 0.2  # of the seeds, each way
TURNS_S = (0.0, 0.02, 0.1, 0.5)
ALONE_STEPS_MAX = (0, 0, 0, 1, 2, 5)
GATHER_S = (0.0, 0.0, 0.0, 0.5, 4.0)  # that the first step waits for who has not come
LATE_SHARE = 0.35  # of the seeds: merges and inspections take time, and overtake each other
OLDER_SHARE = 1 / 3  # of worlds in which half of the learners are older
NARROW_SHARE = 0.35  # of the seeds: the window has room for one fragment, and what is sent takes its time to leave
KEPT_SHARE = 0.35  # of the seeds: versions are kept
ROLLED_BACK_SHARE = 0.6  # of those: the operator goes back to one, or to the start
HOSTILE_SHARE = 0.3  # of the seeds in which K is a share: a learner is hostile
KEYS_SHARE = 0.5  # of the seeds: each learner has a key of its own, else all share a token
EXPELLED_SHARE = 0.2  # of the seeds with learners enough: the operator turns one of them out
ORDERS_SHARE = 0.3  # of the seeds: the operator gives orders
ORDERS = ("set", "set", "set", "extend", "extend", "drop", "finish")
ADOPT = ("rebase", "rebase", "overwrite", "blend")


@dataclass(frozen=True)
class Scenario:
    config: configs.Config
    step_s: dict[str, float]  # by learner
    delay_s: float
    bulk_s: float
    loss: float
    duplicates: float
    kinds: tuple[str, ...]
    fault_every_s: float
    fault_s: float
    turn_s: float = 0.0  # for so long at most the syncer lets events wait for each other
    gone: str = ""  # a learner that does not come back when everything else does
    window_bytes: int = WINDOW_BYTES  # on their way to a learner; 1: a fragment at a time
    leave_s: float = 0.0  # how long a payload takes at most to leave, beyond what it takes to arrive
    work_s: float = 0.0  # what a merge or an inspection takes, on average; 0: it is carried out at once
    rollback_s: float = 0.0  # when the operator begins to look for a kept version to go back to; 0: never
    has_keys: bool = True  # a connection proves its learner's name
    is_hostile: bool = False  # one more learner takes part that says what is not true
    expelled: str = ""  # learner that the operator turns out in the end; none if empty
    expel_s: float = 0.0  # when
    orders: tuple[tuple[float, str], ...] = ()  # when the operator gives which
    older: frozenset[str] = frozenset()  # learners of a version that knows no orders: they wait for pulls

    @property
    def learners(self) -> tuple[str, ...]:
        return tuple(self.step_s)


def draw(seed: int) -> Scenario:
    r = random.Random(f"scenario {seed}")
    names = ["a", "b", "c", "d", "e"][: r.choice([1, 2, 3, 3, 4, 5])]
    base_step_s = r.choice([0.3, 0.6, 0.6])
    step_s = {name: base_step_s * r.choice([1.0, 1.0, 1.1, 1.5, 3.0]) for name in names}
    fault_s = r.choice([0.0, 4.0, 6.0, 8.0])
    kinds = tuple(kind for kind in KINDS if r.random() < r.choice([0.2, 0.5]))
    config = _config(r, step_s, fault_s + r.choice([2.0, 4.0, 6.0]))
    # What follows is drawn apart, so that a known seed draws everything else as it did.
    adopt = random.Random(f"adopt {seed}").choice(ADOPT)
    alone = random.Random(f"alone {seed}").choice(ALONE_STEPS_MAX)
    learner = replace(config.learner, adopt=adopt, alone_steps_max=alone)
    config = replace(config, learner=learner, wire=_some_int2(config.wire, seed))
    work_s, interrupts = _late_work(seed)
    window_bytes, leave_s, streams = _narrow_window(seed)
    config = replace(config, wire=replace(config.wire, streams=streams))
    every = random.Random(f"checkpoints {seed}").choice([1, 2, 3, 5, 16])
    keep_every, rollback_s = _kept(seed)
    config = replace(config, store=replace(config.store, checkpoint_every=every, keep_every=keep_every))
    config = replace(config, run=replace(config.run, gather_s=random.Random(f"gather {seed}").choice(GATHER_S)))
    may_go = fault_s and len(names) > 1 and config.sync.quorum != len(names)
    scenario = Scenario(
        config,
        step_s,
        delay_s=r.choice([0.005, 0.05, 0.3]),
        bulk_s=r.choice([0.02, 0.2, 1.0]),
        loss=r.choice([0.0, 0.0, 0.05, 0.3]),
        duplicates=r.choice([0.0, 0.2]),
        kinds=kinds + interrupts if kinds else kinds,
        fault_every_s=r.choice([0.5, 1.0, 2.0]),
        fault_s=fault_s if kinds else 0.0,
        turn_s=random.Random(f"turn {seed}").choice(TURNS_S),
        gone=r.choice(names) if may_go and r.random() < 0.1 else "",
        work_s=work_s,
        window_bytes=window_bytes,
        leave_s=leave_s,
        older=_some_older(names, seed),
        rollback_s=rollback_s,
        has_keys=random.Random(f"keys {seed}").random() < KEYS_SHARE,
    )
    expelled, expel_s = _expelled(scenario, seed)
    is_hostile = random.Random(f"hostile {seed}").random() < HOSTILE_SHARE and not isinstance(config.sync.quorum, int)
    scenario = dataclasses.replace(scenario, expelled=expelled, expel_s=expel_s, is_hostile=is_hostile)
    return dataclasses.replace(scenario, orders=_orders(seed))


def _late_work(seed: int) -> tuple[float, tuple[str, ...]]:
    """How long work takes, and whether it is also interrupted."""
    r = random.Random(f"work {seed}")
    if r.random() >= LATE_SHARE:
        return 0.0, ()
    return r.choice([0.03, 0.2, 0.6]), (INTERRUPT,) * r.choice([0, 2])


def _kept(seed: int) -> tuple[float, float]:
    """How often a version is kept, and when the run goes back to one; 0: never."""
    r = random.Random(f"kept {seed}")
    if r.random() >= KEPT_SHARE:
        return 0.0, 0.0
    every = r.choice([0.1, 0.25, 1.0, 3.0])
    return every, r.uniform(1.0, 12.0) if r.random() < ROLLED_BACK_SHARE else 0.0


def _expelled(scenario: Scenario, seed: int) -> tuple[str, float]:
    """Whom the operator turns out and when; nobody where the others would be too few for the quorum."""
    r, quorum = random.Random(f"expelled {seed}"), scenario.config.sync.quorum
    left = len(scenario.learners) - 1 - bool(scenario.gone)
    if left < (quorum if isinstance(quorum, int) else 1) or r.random() >= EXPELLED_SHARE:
        return "", 0.0
    return r.choice(scenario.learners), r.uniform(0.5, 12.0)


def _orders(seed: int) -> tuple[tuple[float, str], ...]:
    """When the operator gives which order; what is in it is drawn when it is given."""
    r = random.Random(f"orders {seed}")
    if r.random() >= ORDERS_SHARE:
        return ()
    return tuple((r.uniform(0.5, 12.0), r.choice(ORDERS)) for _ in range(r.choice([1, 2, 4])))


def _narrow_window(seed: int) -> tuple[int, float, int]:
    """The window, how long payloads take to leave, and the streams of a learner, of which each has a fragment."""
    r = random.Random(f"window {seed}")
    is_narrow = r.random() < NARROW_SHARE
    return (1, r.choice([0.0, 1.0, 3.0]), r.choice([1, 1, 2])) if is_narrow else (WINDOW_BYTES, 0.0, 4)


def _some_older(names: Sequence[str], seed: int) -> frozenset[str]:
    r = random.Random(f"older {seed}")
    return frozenset(name for name in names if r.random() < 0.5) if r.random() < OLDER_SHARE else frozenset()


def _config(r: random.Random, step_s: dict[str, float], run_s: float) -> configs.Config:
    count = len(step_s)
    steps = max(4, round(run_s * sum(1 / s for s in step_s.values()) / count))
    budget = r.choice(["steps", "tokens", "minutes"])
    every = r.choice([1, 2, 4, 8])
    return configs.Config(
        run=configs.Run(
            learners=count,
            steps=steps if budget == "steps" else 0,
            tokens=steps * count * 5 if budget == "tokens" else 0,
            minutes=run_s / 60 if budget == "minutes" else 0.0,
        ),
        sync=configs.Sync(
            num_fragments=r.choice([1, 2, 2, 3]),
            sync_every=every,
            fragment_sync_delay=r.choice([1, min(2, every)]),
            quorum=r.choice([1, 0.5, 0.5, 0.99, min(2, count), count]),
            grace=r.choice([0.0, 0.8]),
            policy=r.choice(["auto", "fixed"]),
            warm_steps=r.choice([2, 10, 500]),
            warm_every=r.choice([1, 4]),
            cool_share=r.choice([0.0, 0.1, 0.5]),
            stale_versions_max=r.choice([2, 16, 16]),
            stall_s=r.choice([2.0, 5.0]),
            close_timeout_s=60.0,
        ),
        wire=configs.Wire(
            codec_up=r.choice(CODECS),
            codec_down=r.choice(CODECS),
            timeout_s=r.choice([1.0, 4.0]),
            held_bytes_max=r.choice([2, 50, 50, 50]) * BYTES["fp32"],
        ),
        store=configs.Store(
            deltas_kept=r.choice([0, 1, 4]),
            segment_bytes=r.choice([2_000, 1 << 20]),
            record=r.choice(["decisions", "decisions", "full"]),
        ),
        learner=configs.Learner(residual=r.choice(["theta", "buffer"]), leave_timeout_s=5.0),
    )


def _some_int2(wire: configs.Wire, seed: int) -> configs.Wire:
    r = random.Random(f"int2 {seed}")
    up, down = ("int2" if r.random() < INT2_SHARE else codec for codec in (wire.codec_up, wire.codec_down))
    return replace(wire, codec_up=up, codec_down=down)


def under(plan: FaultPlan, seed: int) -> tuple[Scenario, list[Fault]]:
    """The run of a fault plan, as `skerry chaos` would run it on this seed, but in virtual time and small."""
    r = random.Random(f"plan {seed}")
    speeds = plan.speeds or (1.0,) * plan.learners
    step_s = {f"learner-{n}": 0.3 / speed for n, speed in enumerate(speeds)}
    config = configs.Config(
        run=configs.Run(learners=plan.learners, minutes=plan.minutes),
        sync=configs.Sync(num_fragments=4, sync_every=16),
        wire=_some_int2(configs.Wire(codec_up=r.choice(CODECS), codec_down=r.choice(CODECS)), seed),
        store=configs.Store(segment_bytes=20_000),
    )
    scenario = Scenario(
        config, step_s, delay_s=0.005, bulk_s=0.02, loss=0.0, duplicates=0.0, kinds=(), fault_every_s=1.0,
        fault_s=60 * plan.minutes,
    )  # fmt: skip
    return scenario, schedule(plan, plan.minutes, plan.learners, seed)
