"""Machines driven by hand: a syncer whose merges are done on the spot, a learner whose boundaries are passed by call.

`Desk` plays everything around one SyncerMachine: it makes facts durable, finishes merges and sends, and keeps for each
learner what it would report. `Bench` does the same for one LearnerMachine. Both return the actions of a call, in order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from skerry import config as configs
from skerry.core.events import (
    Adopt,
    Arrived,
    Boundary,
    Checkpoint,
    CheckpointDone,
    Contribute,
    Departed,
    FastForward,
    Joined,
    Merge,
    MergeDone,
    Prepared,
    PublicationSent,
    Publish,
    Record,
    Reported,
    Snapshot,
    Spare,
    Started,
    Taken,
    Ticked,
    Told,
)
from skerry.core.facts import RULES, Checkpointed, Committed, Entry, EpochStarted, Result, RunCreated
from skerry.core.flow import Window
from skerry.core.learner import Labour, LearnerMachine, Traffic
from skerry.core.messages import FULL, Contribution, FragmentPosition, Publication, Pull, Report, Welcome
from skerry.core.state import decode_fact, fold
from skerry.core.syncer import SyncerMachine
from skerry.core.vocabulary import Flaw

TOKENS_PER_STEP = 10


def config_of(run: dict | None = None, **sync) -> configs.Config:
    """Two fragments, H = 4, fixed, K = 1, no grace; a budget nobody reaches."""
    defaults = {"num_fragments": 2, "sync_every": 4, "fragment_sync_delay": 2, "quorum": 1, "policy": "fixed"}
    return configs.Config(
        run=configs.Run(**({"learners": 3, "steps": 10**6} | (run or {}))),
        sync=configs.Sync(**(defaults | {"grace": 0.0} | sync)),
    )


def committed(m: Merge) -> Committed:
    name = str(m.decision.version).encode()
    return Committed(m.decision, Result(name, name, Entry(1, 0, 0, b"")))


@dataclass
class Peer:
    """A learner as its own reports describe it."""

    process: str
    life: int = 0
    number: int = 0
    seq: int = 0
    step: int = 0
    versions: list[int] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    orders: list[int] = field(default_factory=list)


class Desk:
    def __init__(self, config: configs.Config | None = None, **sync) -> None:
        self.config = config or config_of(**sync)
        self.count = self.config.sync.num_fragments
        self.now = 0.0
        self.peers: dict[str, Peer] = {}
        self.adopts = True  # learners adopt what is published at once
        self.obeys = False  # and know of orders; else they are of an older version, and wait for pulls
        zero = tuple(b"0" for _ in range(self.count))
        files = tuple(f"{p}.0" for p in range(self.count))
        genesis = RunCreated(
            "run",
            RULES,
            configs.encode(self.config),
            b"",
            msgspec.json.encode([[]] * len(files)),
            files,
            zero,
            zero,
            zero,
        )
        self.tape = [msgspec.msgpack.encode(genesis)]
        self.start()

    def start(self) -> list[object]:
        """A syncer process begins (again): all it knows is on the tape."""
        state = fold(decode_fact(record) for record in self.tape)
        started = EpochStarted(state.epoch + 1)
        self.tape.append(msgspec.msgpack.encode(started))
        state.apply(started)
        self.machine = SyncerMachine(configs.decode(state.config), state, self.now, Window([1] * self.count, streams=1))
        return self.step(Started())

    def step(self, event: object) -> list[object]:
        """One event and all that follows from it; what must be durable is, in the order of the list."""
        events, seen = deque([event]), []
        while events:
            for action in self.machine.step(events.popleft(), self.now):
                seen.append(action)
                match action:
                    case Record():
                        self.tape.append(msgspec.msgpack.encode(action.fact))
                    case Merge():
                        events.append(MergeDone(committed(action)))
                    case Checkpoint():
                        p, version = action.fragment, self.machine.state.fragments[action.fragment].version
                        events.append(CheckpointDone(Checkpointed(p, version, f"{p}.{version}", b"")))
                    case Publish():
                        peer = self.peers[action.learner]
                        if self.adopts:
                            peer.versions[action.fragment] = action.version
                            peer.marks[action.fragment] = max(peer.marks[action.fragment], action.settled_step)
                            peer.orders[action.fragment] = action.order if self.obeys else 0
                        events.append(PublicationSent(action.learner, action.life, action.fragment, action.version))
        self.machine.state.ledger.check()
        return seen

    # what learners do

    def join(self, name: str, process: str = "", life: int = 0, has_key: bool = True) -> list[object]:
        process = process or f"{name}1"
        actions = self.step(Joined(name, process, life, has_key))
        for action in actions:
            message = getattr(action, "message", None)
            if isinstance(message, Welcome) and message.learner == name:
                known = self.peers.get(name)
                if known is None or known.life != message.life:
                    self.peers[name] = Peer(
                        process, message.life, 0, 0, 0, [FULL] * self.count, [0] * self.count, [0] * self.count
                    )
        return actions

    def ready(self, *names: str) -> None:
        """Join, be handed every fragment, adopt, and say so."""
        for name in names:
            self.join(name)
            self.report(name, 0)
            self.report(name, 0)

    def report(self, name: str, step: int, state: str = "training", step_s: float = 1.0, **at) -> list[object]:
        peer = self.peers[name]
        peer.number, peer.step = peer.number + 1, step
        peer.marks = list(at.get("marks", peer.marks))
        peer.versions = list(at.get("versions", peer.versions))
        outstanding = at.get("outstanding", {})
        positions = tuple(
            FragmentPosition(
                version, mark, mark * TOKENS_PER_STEP, outstanding.get(p, 0), p in at.get("want_full", ()), order
            )
            for p, (version, mark, order) in enumerate(zip(peer.versions, peer.marks, peer.orders, strict=True))
        )
        tokens = step * at.get("step_tokens", TOKENS_PER_STEP)
        return self.step(
            Reported(Report(name, peer.life, peer.number, step, tokens, step_s if step else 0.0, state, positions))
        )

    def contribution(self, name: str, p: int, to: int | None = None, **changes) -> Contribution:
        peer = self.peers[name]
        peer.seq += 1
        at, to = peer.marks[p], peer.step if to is None else to
        fields = {
            "learner": name,
            "life": peer.life,
            "seq": peer.seq,
            "fragment": p,
            "base_version": max(0, peer.versions[p]),
            "from_step": at,
            "from_tokens": at * TOKENS_PER_STEP,
            "to_step": to,
            "to_tokens": to * TOKENS_PER_STEP,
            "codec": "fp32",
            "digest": b"",
        }
        return Contribution(**(fields | changes))

    def arrive(self, c: Contribution, flaw: Flaw | None = None, payload_bytes: int = 10) -> list[object]:
        return self.step(Arrived(c, payload_bytes, flaw))

    def contribute(self, name: str, p: int, to: int | None = None) -> list[object]:
        return self.arrive(self.contribution(name, p, to))

    def depart(self, name: str) -> list[object]:
        return self.step(Departed(name, self.peers[name].life))

    def wait(self, seconds: float) -> list[object]:
        """Time passes in ticks of half a second; what was done in them, together."""
        actions, end = [], self.now + seconds
        while self.now < end - 1e-9:
            self.now = min(end, self.now + 0.5)
            actions += self.step(Ticked())
        return actions


class Bench:
    """One LearnerMachine in life 1, on version 0 of every fragment."""

    def __init__(self, **sync) -> None:
        config = config_of(**sync)
        self.now = 0.0
        self.machine = LearnerMachine("a", config, config.sync.num_fragments)
        self.snapshots: dict[int, int] = {}  # fragment -> the step after which one is due
        self.to_overwrite: set[int] = set()  # by a fast-forward
        self.welcome()
        for p in range(config.sync.num_fragments):
            self.publish(p, 0, base_version=FULL)

    def step(self, event: object) -> list[object]:
        events, seen = deque([event]), []
        while events:
            for action in self.machine.step(events.popleft(), self.now):
                seen.append(action)
                match action:
                    case Snapshot():
                        self.snapshots[action.fragment] = action.step
                    case Spare():
                        self.snapshots.pop(action.fragment, None)
                    case Adopt():
                        at = action.publication
                        events.append(Prepared(at.fragment, at.version, action.take_out))
                    case FastForward():
                        self.to_overwrite = set(range(self.machine.fragment_count))
        return seen

    def welcome(self, life: int = 1, epoch: int = 1) -> list[object]:
        return self.step(Told(Welcome("run", epoch, "a", life, 0, b"", b"", 0, 0, 0.0)))

    def boundary(self, steps: int = 1, overwritten: tuple[int, ...] = ()) -> list[object]:
        self.now += 1.0
        due = sorted(p for p, step in self.snapshots.items() if step <= self.machine.step_count + steps)
        taken = tuple(Taken(p, self.machine.positions[p].base_version) for p in due)
        overwritten = (*overwritten, *sorted(self.to_overwrite))
        self.to_overwrite = set()
        self.snapshots = {p: step for p, step in self.snapshots.items() if p not in due}
        passed = Boundary(steps, steps * TOKENS_PER_STEP, 1.0, taken, overwritten=overwritten)
        return self.step(passed)

    def pull(
        self, p: int, settled_seq: int = 0, epoch: int = 1, lossless: bool = False, lacking_seq: int = 0
    ) -> list[object]:
        return self.step(Told(Pull(epoch, self.machine.life, p, settled_seq, lossless, 0.0, lacking_seq)))

    def publish(
        self,
        p: int,
        version: int,
        settled_seq: int = 0,
        settled_step: int = 0,
        base_version: int | None = None,
        order: int = 0,
        lay_s: float = 0.0,
    ) -> list[object]:
        base = version - 1 if base_version is None else base_version
        settled = (settled_seq, settled_step, 0.0, order, lay_s)
        return self.step(Told(Publication(1, self.machine.life, p, version, base, "fp32", b"", *settled)))

    @property
    def report(self) -> Report:
        return self.machine.report(Traffic(0, 0, 0, 0.0), Labour())

    def contribute(self, p: int) -> Contribute:
        self.pull(p)
        return only(self.boundary(), Contribute)


def of(actions: list[object], kind: type) -> list:
    """The actions of a kind; messages count as what they say."""
    return [a for a in actions if isinstance(a, kind)] + [
        a.message for a in actions if isinstance(getattr(a, "message", None), kind)
    ]


def only(actions: list[object], kind: type):
    found = of(actions, kind)
    assert len(found) == 1, (kind.__name__, actions)
    return found[0]


__all__ = ["Bench", "Desk", "config_of", "of", "only"]
