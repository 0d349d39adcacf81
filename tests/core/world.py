"""A virtual-time world: one SyncerMachine and several LearnerMachines on a fake wire, everything drawn from one seed.

The machines are the real ones; the processes around them do what the nodes do, with exact integers in place of arrays:
every inner step adds a number of its own to every fragment, a merge is a plain sum with outer step 1. So "no work lost,
none counted twice" is an equation between integers, and it is checked after every event:

    published version = version before + the work of exactly the merged rows
    θ − Θ_b           = the learner's work since its mark, outstanding contribution included

Messages are delayed independently of each other (so control and bulk overtake each other), lost and duplicated; links
break; learners die, stall, leave, are taken over; the syncer dies between any two durable things, and pauses. `run`
has faults, then heals and demands that everyone takes part again, then that the run closes with nothing pending.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from skerry import config as configs
from skerry.core.events import (
    Adopt,
    Arrived,
    Boundary,
    Closing,
    Contribute,
    Departed,
    Dismiss,
    End,
    FastForward,
    Finish,
    Gone,
    Hold,
    Joined,
    Linked,
    Merge,
    MergeDone,
    Prepared,
    PublicationSent,
    Publish,
    Record,
    Reported,
    Resend,
    SayHello,
    Send,
    SendReport,
    Snapshot,
    Spoiled,
    Started,
    SyncerEvent,
    Taken,
    Ticked,
    Told,
    Unlinked,
    Unusable,
)
from skerry.core.facts import Committed, Discarded, EpochStarted, Fact, LifeStarted, PhaseChanged, RunCreated
from skerry.core.learner import LearnerMachine
from skerry.core.ledger import MERGED
from skerry.core.messages import FULL, Contribution, Done, Hello, Publication, Refused, Report, Welcome
from skerry.core.state import RunState, fold
from skerry.core.syncer import SyncerMachine
from skerry.node.model import decode_fact

TICK_S = 0.2
HANDSHAKE = (Hello, Welcome, Refused, Done)  # a link that loses one of these is a link that breaks
CALM_S = 45.0  # no fault for longer than closing takes: whatever goes wrong now is not the weather's doing
LIVE_S_MAX = 45.0  # after healing, everyone has taken part again within this
CLOSE_S_MAX = 600.0  # and the run has closed within this
PAYLOAD_BYTES = 10


@dataclass(frozen=True)
class Plan:
    """What a seed draws: the run's configuration, the weather, and how long it lasts."""

    config: configs.Config
    learners: tuple[str, ...]
    step_s: dict[str, float]
    delay_s: float
    bulk_s: float
    loss: float
    duplicates: float
    merge_s: float
    fault_every_s: float
    fault_s: float


def draw(seed: int) -> Plan:
    r = random.Random(f"plan {seed}")
    names = tuple("abcde"[: r.choice([2, 3, 3, 4, 5])])
    base_step_s = r.choice([0.3, 0.6])
    step_s = {name: base_step_s * r.choice([1.0, 1.0, 1.1, 1.5, 3.0]) for name in names}
    fault_s = r.choice([0.0, 10.0, 20.0, 20.0])
    run_s = fault_s + r.choice([3.0, 25.0, 40.0])
    steps = max(4, round(run_s * sum(1 / s for s in step_s.values()) / len(names)))
    budget = r.choice(["steps", "tokens", "minutes"])
    config = configs.Config(
        run=configs.Run(
            learners=len(names),
            steps=steps if budget == "steps" else 0,
            tokens=steps * len(names) * 5 if budget == "tokens" else 0,
            minutes=run_s / 60 if budget == "minutes" else 0.0,
        ),
        sync=configs.Sync(
            num_fragments=r.choice([1, 2, 3, 4]),
            sync_every=r.choice([2, 4, 8]),
            fragment_sync_delay=r.choice([1, 2]),
            quorum=r.choice([1, 0.5, 0.5, 0.99, min(2, len(names)), len(names)]),
            grace=r.choice([0.0, 0.8]),
            policy=r.choice(["warm", "fixed"]),
            stale_versions_max=r.choice([2, 16, 16]),
            stall_s=r.choice([2.0, 5.0]),
            close_timeout_s=30.0,
        ),
        wire=configs.Wire(held_bytes_max=r.choice([2, 50, 50, 50]) * PAYLOAD_BYTES),
        store=configs.Store(deltas_kept=r.choice([0, 4])),
        learner=configs.Learner(leave_timeout_s=5.0),
    )
    return Plan(
        config,
        names,
        step_s,
        delay_s=r.choice([0.005, 0.05, 0.3]),
        bulk_s=r.choice([0.02, 0.2, 1.0]),
        loss=r.choice([0.0, 0.05, 0.3]),
        duplicates=r.choice([0.0, 0.2]),
        merge_s=r.choice([0.0, 0.0, 0.3]),
        fault_every_s=r.choice([0.7, 1.5, 4.0]),
        fault_s=fault_s,
    )


class Crash(Exception):
    """The syncer's process ends here, between two things it does."""


# ---------------------------------------------------------------------------------------------- the wire


@dataclass(eq=False)
class Link:
    """One connection; what is in flight on it dies with it."""

    process: Learner
    up: bool = True
    who: tuple[str, int] | None = None  # set by the welcome


# ---------------------------------------------------------------------------------------------- a learner process


@dataclass
class Adoption:
    version: int
    base: int
    increment: int | None


@dataclass
class Work:
    """Everything that waits for the next boundary."""

    adoptions: dict[int, Adoption] = field(default_factory=dict)
    snapshots: set[int] = field(default_factory=set)
    fast_forward: bool = False


class Learner:
    """One learner process, as node/learner.py and its shell run it; an integer stands for a fragment's values."""

    def __init__(self, world: World, name: str, number: int) -> None:
        count = world.fragment_count
        self.world, self.name, self.process = world, name, f"{name}{number}"
        self.machine: LearnerMachine | None = None
        self.link: Link | None = None
        self.is_dead = False
        self.is_closing = False  # takes no further step
        self.wants_to_leave = False
        self.closing_at = 0.0
        self.paused_until = 0.0
        self.is_spoiled = False  # the next snapshot holds a NaN
        self.theta: list[int] = [0] * count
        self.bases: list[int | None] = [None] * count
        self.applied: dict[int, tuple[int, int]] = {}
        self.outstanding: dict[int, tuple[Contribution, int]] = {}
        self.sending: set[tuple[int, int]] = set()
        self.work = Work()
        self.boundaries: deque[tuple[Boundary, dict[int, int]]] = deque()
        self.snapshots: dict[int, int] = {}
        self.payload = 0
        self.step_count = 0  # as the training thread counts
        self.dropped_at = 0  # its step at the last fast-forward
        self.done: list[list[int]] = [[0] for _ in range(count)]  # fragment -> step -> all work up to it
        self.tokens = [0]
        self.low = [(FULL, 0)] * count  # version and mark last seen, which never go back
        self.says: Callable[[str], None] = lambda _: None
        world.at(0.0, self.dial)
        world.at(0.01, self.turn)
        world.at(TICK_S, self.tick)

    # the training thread

    def turn(self) -> None:
        """One turn of the training loop: a step, or a look for work while it stands still."""
        if self.is_dead:
            return
        world, machine = self.world, self.machine
        if world.now < self.paused_until:
            world.at(self.paused_until - world.now, self.turn)
            return
        if self.is_closing or len(self.applied) < world.fragment_count:
            if self.work.adoptions or self.work.snapshots or self.work.fast_forward:
                self.boundary(0)
            if self.is_closing:
                self.wait_for_the_end()
            world.at(0.1, self.turn)
            return
        assert machine is not None
        step_s = world.plan.step_s[self.name] * world.random.uniform(0.9, 1.1)
        self.boundary(1, step_s)
        if machine.is_stop_asked or self.wants_to_leave:
            self.is_closing, self.closing_at = True, world.now
            self.drain()
            self.handle(Closing())
        world.at(step_s, self.turn)

    def wait_for_the_end(self) -> None:
        machine, config = self.machine, self.world.plan.config
        assert machine is not None
        waited = self.world.now - self.closing_at
        limit_s = config.sync.close_timeout_s + 5 if machine.is_stop_asked else config.learner.leave_timeout_s
        self.drain()
        if waited > limit_s or (machine.state == "leaving" and machine.is_settled):
            self.world.saw["left"] += 1
            self.handle(Gone())
            self.end()

    def boundary(self, steps: int, step_s: float = 0.0) -> None:
        """Adopt what is prepared, drop the drift if it must be, take the snapshots, go on."""
        for _ in range(steps):
            self.step_count += 1
            for p, done in enumerate(self.done):
                gained = self.world.random.getrandbits(40)
                done.append(done[-1] + gained)
                self.theta[p] += gained
            self.tokens.append(self.tokens[-1] + self.world.random.randrange(1, 10))
        work, self.work = self.work, Work()
        for p, adoption in work.adoptions.items():
            self.theta[p] = adoption.base if adoption.increment is None else self.theta[p] + adoption.increment
            self.applied[p] = (adoption.version, adoption.base)
        if work.fast_forward:
            self.dropped_at = self.step_count
            for p, (_, base) in self.applied.items():
                self.theta[p] = base
        taken = tuple(Taken(p, self.applied[p][0]) for p in sorted(work.snapshots))
        drifts = {p: self.theta[p] - self.applied[p][1] for p in work.snapshots}
        tokens = self.tokens[-1] - self.tokens[-1 - steps]
        self.boundaries.append((Boundary(steps, tokens, step_s, taken, work.fast_forward), drifts))
        self.world.check_learner(self)

    # the node thread

    def tick(self) -> None:
        if self.is_dead:
            return
        if self.machine is not None:
            self.drain()
            self.handle(Ticked())
        self.world.at(TICK_S, self.tick)

    def drain(self) -> None:
        while self.boundaries and self.machine is not None:
            passed, self.snapshots = self.boundaries.popleft()
            self.handle(passed)
            self.snapshots = {}

    def handle(self, event: object) -> None:
        assert self.machine is not None
        events = deque([event])
        while events:
            event = events.popleft()
            self.says(f"> {event}")
            for action in self.machine.step(event, self.world.now):
                self.says(f"< {action}")
                outcome = self.perform(action)
                if outcome is not None:
                    events.append(outcome)
        self.world.check_learner(self)

    def told(self, message: object, payload: int) -> None:
        if self.is_dead:
            return
        if isinstance(message, Refused):
            self.world.saw["told it was taken over"] += 1
            self.end()
            return
        if isinstance(message, Welcome) and self.machine is None:
            self.machine = self.world.learner_machine(self.name, self.world.plan.config, self.world.fragment_count)
            self.world.begin_life(self, message.life)
        if self.machine is None:
            return
        if self.world.random.random() < 0.8:  # else the training thread was quicker than this message
            self.drain()
        self.payload = payload
        self.handle(Told(message))

    def perform(self, action: object) -> object:
        match action:
            case SayHello():
                self.send(Hello(1, self.name, self.process, action.life, b"", ""))
            case SendReport():
                self.send(action.report)
            case Snapshot():
                self.work.snapshots.add(action.fragment)
            case Contribute():
                return self.contribute(action.contribution)
            case Resend():
                self.send_contribution(action.fragment)
            case Adopt():
                return self.adopt(action.publication, action.take_out)
            case FastForward():
                self.world.fast_forwarded(action.reason)
                self.outstanding.clear()
                self.work.fast_forward = True
            case End():
                self.end()
        return None

    def contribute(self, c: Contribution) -> object:
        if self.is_spoiled:
            self.is_spoiled = False
            return Spoiled(c.fragment, "w")
        self.world.check_contribution(self, c, self.snapshots[c.fragment])
        self.outstanding[c.fragment] = (c, self.snapshots[c.fragment])
        self.send_contribution(c.fragment)
        return None

    def send_contribution(self, p: int) -> None:
        c, payload = self.outstanding[p]
        if (p, c.seq) not in self.sending:
            self.sending = {(p, c.seq)} | {(q, seq) for q, seq in self.sending if q != p}
            self.send(c, payload, sent=lambda: self.sending.discard((p, c.seq)))

    def send(self, message: object, payload: int = 0, sent: Callable[[], None] | None = None) -> None:
        if self.link is not None:
            link = self.link
            self.world.carry(link, message, payload, lambda m, x: self.world.syncer_takes(link, m, x), sent)

    def adopt(self, publication: Publication, take_out: int) -> object:
        p = publication.fragment
        old = self.bases[p]
        self.world.check_publication(publication)
        whole = publication.base_version == FULL
        base = self.payload if whole else self.payload + (0 if old is None else old)
        if str(base).encode() != publication.digest or self.world.is_struck(0.02):
            self.world.saw["unusable"] += 1
            return Unusable(p)
        increment = None
        if old is not None:
            increment = base - old
            if take_out:
                c, payload = self.outstanding.pop(p)
                assert c.seq == take_out, (c, take_out)
                increment -= payload
        waiting = self.work.adoptions.get(p)
        if waiting is not None and increment is not None:
            increment = None if waiting.increment is None else waiting.increment + increment
        self.work.adoptions[p] = Adoption(publication.version, base, increment)
        self.bases[p] = base
        return Prepared(p, publication.version, take_out)

    # its link

    def dial(self) -> None:
        if self.is_dead or self.link is not None:
            return
        if self.world.syncer is None:
            self.world.at(0.5, self.dial)
            return
        self.link = Link(self)
        self.sending.clear()
        if self.machine is None:
            self.send(Hello(1, self.name, self.process, 0, b"", ""))
        else:
            self.handle(Linked())

    def lost(self, link: Link) -> None:
        if self.link is not link or self.is_dead:
            return
        self.link = None
        if self.machine is not None:
            self.handle(Unlinked())
        self.world.at(self.world.random.uniform(0.1, 1.0), self.dial)

    def end(self) -> None:
        """The process is over; its last words still leave."""
        self.is_dead = True
        if self.link is not None:
            link, self.link = self.link, None
            self.world.at(1.0, lambda: self.world.cut(link))


# ---------------------------------------------------------------------------------------------- the syncer process


class Syncer:
    """One syncer process, as node/syncer.py and its shell run it."""

    def __init__(self, world: World) -> None:
        self.world = world
        state = fold(decode_fact(record) for record in world.tape)
        started = EpochStarted(state.epoch + 1, 0.0)
        world.write(started)
        state.apply(started)
        self.values = [int(f.digest) for f in state.fragments]
        self.deltas: list[dict[int, int]] = [{} for _ in state.fragments]
        self.payloads: dict[tuple[str, int], tuple[int, int]] = {}
        self.links: dict[tuple[str, int], Link] = {}
        self.joining: Link | None = None
        self.arriving = 0
        self.paused_until = 0.0
        self.finished = ""
        self.says: Callable[[str], None] = world.says
        self.machine = world.syncer_machine(world.plan.config, world.restored(state), world.now)

    def start(self) -> None:
        self.handle(Started())
        self.world.at(TICK_S, self.tick)

    def tick(self) -> None:
        if self.world.syncer is not self or self.finished:
            return
        if self.world.now >= self.paused_until:
            self.handle(Ticked())
        self.world.at(TICK_S, self.tick)

    def handle(self, event: SyncerEvent) -> None:
        events: deque[SyncerEvent] = deque([event])
        try:
            while events:
                event = events.popleft()
                self.says(f"> {event}")
                before = Counter(self.machine.refused)
                actions = self.machine.step(event, self.world.now)
                self.world.saw.update({f"refused: {k}": n for k, n in (Counter(self.machine.refused) - before).items()})
                events.extend(self.perform(actions))
                self.world.check_syncer(self)
        except Crash:
            self.world.crash_syncer()

    def perform(self, actions: list[object]) -> list[SyncerEvent]:
        facts: list[Fact] = []
        done: list[SyncerEvent] = []
        for action in actions:
            self.says(f"< {action}")
            match action:
                case Record():
                    facts.append(action.fact)
                case Merge() if self.world.plan.merge_s:
                    self.merge_slowly(action)
                case Merge():
                    fact = self.merge(action, self.take(action))
                    facts.append(fact)
                    done.append(MergeDone(fact))
                case _:
                    self.commit(facts)
                    facts = []
                    self.act(action)
        self.commit(facts)
        return done

    def commit(self, facts: list[Fact]) -> None:
        if not facts:
            return
        if self.world.is_struck(0.01):
            raise Crash
        for fact in facts:
            self.world.write(fact)
        if self.world.is_struck(0.05):
            self.world.saw["crash between commit and broadcast"] += any(isinstance(f, Committed) for f in facts)
            raise Crash

    def act(self, action: object) -> None:
        match action:
            case Send():
                if isinstance(action.message, Welcome):
                    self.bind(action.learner, action.life)
                self.send(action.learner, action.life, action.message)
            case Hold():
                self.payloads[action.learner, action.fragment] = (action.seq, self.arriving)
                self.world.saw["late, held for the next round"] += action.fragment not in self.machine.rounds
            case Publish():
                self.publish(action)
            case Dismiss():
                link = self.links.pop((action.learner, action.life), None) if action.life else self.joining
                if link is not None:
                    link.who = None
                    link.process.told(Refused(action.reason), 0)
                    self.world.cut(link)
            case Finish():
                self.finished = action.reason

    # merge and publish

    def take(self, action: Merge) -> list[int]:
        taken = []
        for c in action.contributions:
            seq, payload = self.payloads.pop((c.learner, c.fragment))
            assert seq == c.seq, (c, seq)
            taken.append(payload)
        self.world.check_merge(self, action)
        return taken

    def merge(self, action: Merge, payloads: list[int]) -> Committed:
        p = action.fragment
        delta = sum(payloads)
        self.values[p] += delta
        self.deltas[p][action.version] = delta
        self.deltas[p].pop(action.version - self.world.plan.config.store.deltas_kept, None)
        state = self.machine.state
        return Committed(
            epoch=state.epoch,
            fragment=p,
            version=action.version,
            file=f"{p}.{action.version}",
            digest=str(self.values[p]).encode(),
            parent=state.fragments[p].digest,
            rule=action.rule,
            outer=action.outer,
            lr=action.lr,
            momentum=action.momentum,
            codec="fp32",
            sync_every=action.sync_every,
            quorum=action.quorum,
            phase=action.phase,
            reason=action.reason,
            ready=action.ready,
            weights=(),
            rows=action.rows,
            seen=action.seen,
            progress=action.progress,
            open_s=action.open_s,
            elapsed_s=action.elapsed_s,
            at=0.0,
        )

    def merge_slowly(self, action: Merge) -> None:
        payloads = self.take(action)

        def finish() -> None:
            if self.world.syncer is not self:
                return
            fact = self.merge(action, payloads)
            try:
                self.commit([fact])
            except Crash:
                self.world.crash_syncer()
            else:
                self.handle(MergeDone(fact))

        self.world.at(self.world.random.uniform(0, self.world.plan.merge_s), finish)

    def publish(self, action: Publish) -> None:
        p, kept = action.fragment, self.deltas[action.fragment]
        lacking = range(action.base_version + 1, action.version + 1)
        if action.base_version > FULL and all(v in kept for v in lacking):
            for version in lacking:
                self.send_version(action, version, version - 1, kept[version])
        else:
            self.send_version(action, action.version, FULL, self.values[p])

    def send_version(self, action: Publish, version: int, base_version: int, payload: int) -> None:
        p, is_last = action.fragment, version == action.version
        message = Publication(
            epoch=self.machine.state.epoch,
            life=action.life,
            fragment=p,
            version=version,
            base_version=base_version,
            codec="fp32",
            digest=str(self.world.published[p, version]).encode(),
            settled_seq=action.settled_seq if is_last else 0,
            settled_step=action.settled_step if is_last else 0,
            progress=action.progress,
        )
        link = self.links.get((action.learner, action.life))

        def sent() -> None:
            if is_last and link is not None and self.links.get((action.learner, action.life)) is link:
                self.handle(PublicationSent(action.learner, action.life, p, version))

        self.send(action.learner, action.life, message, payload, sent)

    # its links

    def hello(self, link: Link, hello: Hello) -> None:
        self.joining = link
        self.handle(Joined(hello.learner, hello.process, hello.life))
        self.joining = None

    def bind(self, learner: str, life: int) -> None:
        before, link = self.links.get((learner, life)), self.joining
        assert link is not None
        assert self.world.lives.get(learner) == life, f"life {life} of {learner} leaves before it is durable"
        if before is not None and before is not link:
            before.who = None
            self.world.cut(before)
        self.links[learner, life] = link
        link.who = (learner, life)

    def send(
        self, learner: str, life: int, message: object, payload: int = 0, sent: Callable[[], None] | None = None
    ) -> None:
        link = self.links.get((learner, life))
        if link is not None:
            self.world.carry(link, message, payload, link.process.told, sent)

    def lost(self, link: Link) -> None:
        if link.who is not None and self.links.get(link.who) is link:
            who = link.who
            del self.links[who]
            self.handle(Departed(*who))


# ---------------------------------------------------------------------------------------------- the world


class World:
    """The heap of things to come, the wire, the faults, the truth, and the checks."""

    def __init__(
        self,
        seed: int,
        syncer_machine: type[SyncerMachine] = SyncerMachine,
        learner_machine: type[LearnerMachine] = LearnerMachine,
        plan: Plan | None = None,
    ) -> None:
        self.seed, self.plan = seed, plan or draw(seed)
        self.random = random.Random(f"world {seed}")
        self.syncer_machine, self.learner_machine = syncer_machine, learner_machine
        self.fragment_count = self.plan.config.sync.num_fragments
        self.now = 0.0
        self.has_faults = self.plan.fault_s > 0
        self.saw: Counter[str] = Counter()
        self.says: Callable[[str], None] = lambda _: None
        self.tape: list[bytes] = []
        self.published: dict[tuple[int, int], int] = {}
        self.durable = [0] * self.fragment_count
        self.truth: dict[tuple[str, int], Learner] = {}
        self.booked: dict[tuple[str, int, int], tuple[int, int]] = {}  # (learner, life, fragment) -> settled
        self.merged_to: dict[tuple[str, int, int], int] = {}
        self.lives: dict[str, int] = {}  # newest life on the tape
        self.processes: dict[str, Learner] = {}
        self.healed_at: float | None = None if self.has_faults else 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._numbers = 0
        self.syncer: Syncer | None = None
        self.create()

    def create(self) -> None:
        count = self.fragment_count
        zero = tuple(b"0" for _ in range(count))
        files = tuple(f"{p}.0" for p in range(count))
        created = RunCreated("run", configs.encode(self.plan.config), b"", files, zero, 0.0)
        self.tape.append(msgspec.msgpack.encode(created))
        self.published |= {(p, 0): 0 for p in range(count)}
        self.start_syncer()
        for name in self.plan.learners:
            self.at(self.random.uniform(0, 2), lambda name=name: self.boot(name))

    # time

    def at(self, delay_s: float, call: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._order, call))

    def run_until(self, end: float, is_over: Callable[[], bool] = lambda: False) -> bool:
        while self._heap and self._heap[0][0] <= end:
            if is_over():
                return True
            self.now, _, call = heapq.heappop(self._heap)
            call()
        self.now = max(self.now, end)
        return is_over()

    def run(self) -> Counter[str]:
        """Faults, safety; heal, liveness; the end. What happened, counted."""
        if self.has_faults:
            self.at(self.plan.fault_every_s, self.strike)
            self.run_until(self.plan.fault_s)
            self.heal()
        self.demand_participation()
        self.demand_end()
        return self.saw

    # the wire

    def carry(
        self,
        link: Link,
        message: object,
        payload: int,
        take: Callable[[object, int], None],
        sent: Callable[[], None] | None = None,
    ) -> None:
        is_bulk = isinstance(message, Contribution | Publication)
        mean_s = self.plan.delay_s + (self.plan.bulk_s if is_bulk else 0.0)
        safe = isinstance(message, HANDSHAKE) or not self.has_faults
        copies = 1 if safe else (self.random.random() >= self.plan.loss) + (self.random.random() < self.plan.duplicates)
        for _ in range(copies):

            def deliver() -> None:
                if link.up:
                    take(message, payload)

            self.at(min(8 * mean_s, self.random.expovariate(1 / mean_s)), deliver)
        if sent is not None:
            self.at(self.random.uniform(0, mean_s), lambda: sent() if link.up else None)

    def syncer_takes(self, link: Link, message: object, payload: int) -> None:
        syncer = self.syncer
        if syncer is None or not link.up or syncer.finished == "crashed":
            return
        if self.now < syncer.paused_until:
            self.at(syncer.paused_until - self.now, lambda: self.syncer_takes(link, message, payload))
        elif isinstance(message, Hello):
            syncer.hello(link, message)
        elif link.who is None:
            return
        elif isinstance(message, Report):
            syncer.handle(Reported(message))
        elif isinstance(message, Contribution):
            syncer.arriving = payload
            fault = "damaged: planted" if self.is_struck(0.01) else ""
            syncer.handle(Arrived(message, PAYLOAD_BYTES, fault))

    def cut(self, link: Link) -> None:
        """The connection breaks; each end notices in its own time."""
        if not link.up:
            return
        link.up = False
        if link.process.link is link:
            self.at(self.random.uniform(0, 0.5), lambda: link.process.lost(link))
        syncer = self.syncer
        if syncer is not None:
            self.at(self.random.uniform(0, 2), lambda: syncer.lost(link) if self.syncer is syncer else None)

    # life and death

    def boot(self, name: str) -> None:
        self._numbers += 1
        self.processes[name] = Learner(self, name, self._numbers)
        self.processes[name].says = self.says

    def begin_life(self, process: Learner, life: int) -> None:
        assert (process.name, life) not in self.truth, f"life {life} of {process.name} was handed out twice"
        self.truth[process.name, life] = process

    def start_syncer(self) -> None:
        self.syncer = Syncer(self)
        self.syncer.start()

    def crash_syncer(self) -> None:
        syncer = self.syncer
        if syncer is None:
            return
        self.saw["syncer crash"] += 1
        syncer.finished, self.syncer = "crashed", None
        for process in self.truth.values():
            if process.link is not None:
                self.cut(process.link)
        for process in self.processes.values():
            if process.link is not None:
                self.cut(process.link)
        self.at(self.random.uniform(0.1, 3), self.start_syncer)

    def kill(self, name: str) -> None:
        process = self.processes[name]
        process.is_dead = True
        if process.link is not None:
            self.cut(process.link)
        self.at(self.random.uniform(0.1, 4), lambda: self.boot(name) if self.processes[name].is_dead else None)

    def is_struck(self, chance: float) -> bool:
        return self.has_faults and self.random.random() < chance

    def strike(self) -> None:
        """One fault, drawn at random, and the next one later."""
        if not self.has_faults:
            return
        name = self.random.choice(self.plan.learners)
        process = self.processes.get(name)
        alive = process is not None and not process.is_dead
        kind = self.random.choice(["kill", "cut", "cut", "crash", "pause", "freeze", "take over", "leave", "spoil"])
        if kind == "crash":
            self.crash_syncer()
        elif kind == "freeze" and self.syncer is not None:
            self.syncer.paused_until = self.now + self.random.choice([1.0, 8.0])
        elif alive and process is not None:
            self.saw[kind] += 1
            if kind == "kill":
                self.kill(name)
            elif kind == "cut" and process.link is not None:
                self.cut(process.link)
            elif kind == "pause":
                process.paused_until = self.now + self.random.choice([1.0, 8.0])
            elif kind == "take over":
                self.boot(name)  # the process that runs under this name does not know yet
            elif kind == "spoil":
                process.is_spoiled = True
            elif kind == "leave" and self.random.random() < 0.3:
                process.wants_to_leave = True
        self.at(self.random.expovariate(1 / self.plan.fault_every_s), self.strike)

    def heal(self) -> None:
        """No more faults: everything that is down comes up again, also who had left."""
        self.has_faults, self.healed_at = False, self.now
        if self.syncer is not None:
            self.syncer.paused_until = 0.0
        for name in self.plan.learners:
            process = self.processes.get(name)
            if process is None:
                continue
            process.paused_until, process.is_spoiled, process.wants_to_leave = 0.0, False, False
            self.at(5.0, lambda name=name: self.boot(name) if self.processes[name].is_dead else None)

    # what is demanded

    def demand_participation(self) -> None:
        """Everyone's work that is done from here on merges on every fragment before long."""
        if not self.run_until(self.now + 8.0, self.is_closing):
            reach = {name: p.step_count for name, p in self.processes.items() if not p.is_closing}

            def all_took_part() -> bool:
                return self.is_closing() or all(
                    self.merged_to.get((name, p.machine.life, fragment), 0) > reach[name]
                    for name, p in self.processes.items()
                    if name in reach and p.machine is not None and not p.is_dead
                    for fragment in range(self.fragment_count)
                )

            assert self.run_until(self.now + LIVE_S_MAX, all_took_part), f"someone takes no part: {self}"

    def demand_end(self) -> None:
        """The budget is used up, everything settles, everyone goes home."""
        assert self.run_until(self.now + CLOSE_S_MAX, self.is_closed), f"the run does not close: {self}"
        self.run_until(self.now + 3.0)
        assert self.syncer is not None
        state = self.syncer.machine.state
        totals = fold(decode_fact(record) for record in self.tape).ledger.totals()
        assert totals.pending == 0 and totals.produced == totals.merged + sum(totals.discarded.values()), totals
        assert totals == state.ledger.totals(), "the tape and the syncer disagree"
        for fate in totals.discarded:
            self.saw[f"discarded: {fate}"] += 1
        for process in self.processes.values():
            machine = process.machine
            assert process.is_dead or machine is None or machine.life == 0, f"{machine} was not told of the end"

    def is_closing(self) -> bool:
        return self.syncer is not None and self.syncer.machine.state.phase in ("closing", "closed")

    def is_closed(self) -> bool:
        return self.syncer is not None and self.syncer.machine.state.phase == "closed"

    def __repr__(self) -> str:
        machines = [p.machine or p.process for p in self.processes.values()]
        return f"<world {self.seed} at {self.now:.1f}: {self.syncer and self.syncer.machine} {machines}>"

    # what is checked

    def write(self, fact: Fact) -> None:
        """A fact becomes durable; it is held against the truth, not against the syncer's own books."""
        self.tape.append(msgspec.msgpack.encode(fact))
        match fact:
            case Committed():
                self.check_commit(fact)
                self.book(fact.rows)
            case Discarded():
                self.book(fact.rows)
            case PhaseChanged() if fact.phase == "closed":
                self.saw["closed"] += 1
            case LifeStarted():
                self.lives[fact.learner] = fact.life
                self.saw["rejoined in a new life"] += fact.life > 1

    def check_commit(self, fact: Committed) -> None:
        p = fact.fragment
        assert fact.version == self.durable[p] + 1, f"version {fact.version} of {p} after {self.durable[p]}"
        value = self.published[p, fact.version - 1]
        for row in fact.rows:
            if row.fate == MERGED:
                done = self.truth[row.learner, row.life].done[p]
                value += done[row.to_step] - done[row.from_step]
        assert int(fact.digest) == value, f"version {fact.version} of {p} is not the work of its rows"
        self.published[p, fact.version] = value
        self.durable[p] = fact.version

    def book(self, rows: tuple[object, ...]) -> None:
        for row in rows:
            key = (row.learner, row.life, row.fragment)
            process = self.truth.get(key[:2])
            assert (row.from_step, row.from_tokens) == self.booked.get(key, (0, 0)), f"rows do not tile: {row}"
            assert process is not None and row.from_step <= row.to_step <= process.step_count, f"never produced: {row}"
            assert row.to_tokens == process.tokens[row.to_step], f"tokens of another step: {row}"
            if row.fate == "absent at close" and self.healed_at is not None and self.now - self.healed_at > CALM_S:
                assert process.is_dead, f"a learner that was there all the time was not waited for: {row}"
            self.booked[key] = (row.to_step, row.to_tokens)
            if row.fate == MERGED:
                self.merged_to[key] = row.to_step

    def check_syncer(self, syncer: Syncer) -> None:
        machine = syncer.machine
        machine.state.ledger.check()
        for p, fragment in enumerate(machine.state.fragments):
            assert self.durable[p] >= fragment.version, f"fragment {p} version {fragment.version} is not durable"
            for learner, c in machine.held[p].items():
                settled = machine.state.ledger.settled(learner, c.life, p)
                assert c.from_step >= settled.step and c.seq > settled.seq, f"held and settled: {c} {settled}"

    def check_merge(self, syncer: Syncer, action: Merge) -> None:
        count, lives = len(action.contributions), syncer.machine.state.lives
        assert [c.learner for c in action.contributions] == sorted({c.learner for c in action.contributions})
        self.saw["merge at bare quorum"] += action.phase != "closing" and count == action.quorum < action.ready
        self.saw["merge of all"] += count == action.ready
        for c in action.contributions:
            self.saw["an old life's contribution merged"] += c.life < lives[c.learner].life

    def check_publication(self, publication: Publication) -> None:
        p, version = publication.fragment, publication.version
        assert version <= self.durable[p], f"version {version} of {p} was seen before it was durable"

    def check_contribution(self, process: Learner, c: Contribution, drift: int) -> None:
        done = process.done[c.fragment]
        assert c.base_version > FULL and c.to_step > c.from_step, c
        assert drift == done[c.to_step] - done[c.from_step], f"the drift is not the work of {c}"
        assert c.fragment not in process.outstanding, f"a second one is outstanding: {c}"

    def check_learner(self, process: Learner) -> None:
        """θ − Θ_b is the work since the mark, whatever is prepared or queued; nothing goes back."""
        machine = process.machine
        if machine is None:
            return
        for p, position in enumerate(machine.positions):
            version, mark = process.low[p]
            assert position.base_version >= version and position.mark_step >= mark, f"went back on {p}: {machine}"
            process.low[p] = (position.base_version, position.mark_step)
            base = process.bases[p]
            if base is None:
                assert position.outstanding is None, "a contribution without a base"
                continue
            waiting = process.work.adoptions.get(p)
            if waiting is not None and waiting.increment is None:
                continue
            theta = process.theta[p] + (waiting.increment if waiting is not None and waiting.increment else 0)
            at = max(position.mark_step, process.dropped_at)
            unsettled = process.done[p][process.step_count] - process.done[p][at]
            assert theta - base == unsettled, f"drift of {p} is not the unsettled work: {machine}"

    def fast_forwarded(self, reason: str) -> None:
        self.saw[f"fast-forward: {'stale' if 'behind' in reason else reason}"] += 1
        assert "not at hand" not in reason, "work was settled that the learner could not take out"

    def restored(self, state: RunState) -> RunState:
        """The state a syncer process starts with; a planted bug changes it here."""
        return state
