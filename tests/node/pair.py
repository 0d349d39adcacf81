"""A real syncer node on a real store, joined with real learner nodes by hand: no socket, no thread, virtual time.

Messages are encoded and decoded and payloads copied, so nothing is shared that could not travel. They are delivered in
the order they were sent, between ticks of one clock; `tap` sees each on its way and may change or lose it. Learners
"train" by adding increments that are remembered in float64, so that a test can say where every bit of work went.
"""

from collections import deque
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np

from skerry import config as configs
from skerry.algo import codecs
from skerry.algo.fragments import Tensor, gather, layout_of, split
from skerry.core.events import Closing, Departed, Joined, Linked, PublicationSent, Reported, Ticked, Unlinked
from skerry.core.facts import Committed
from skerry.core.ledger import MERGED
from skerry.core.messages import Contribution, Hello, LearnerMessage, Publication, Report, SyncerMessage
from skerry.core.state import decode_fact
from skerry.node.algebra import FLOAT32, Values
from skerry.node.cells import Boxes
from skerry.node.learner import LearnerNode
from skerry.node.mailbox import mailbox
from skerry.node.observers import Unwatched
from skerry.node.syncer import SyncerNode
from skerry.node.training import ByHand, TrainingHalf
from skerry.run.genesis import begin
from skerry.store import Store
from skerry.store.journal import Place

STEP_S = 0.125  # exact in binary, so that virtual time has no rounding
STEP_TOKENS = 8
TICKS_MAX = 5000  # far more than anything here needs: a run that stands still fails instead of hanging

TENSORS = (
    Tensor("bias", (5,)),
    Tensor("emb.weight", (20, 16), "embedding"),
    Tensor("scale", ()),
    Tensor("mlp.weight", (33, 7)),
)


def config_of(learners=1, steps=10**6, **tables):
    """The fixed policy with a plain mean and outer step 1, so that work can be followed; tables override it."""
    plain = {
        "run": {"steps": steps, "learners": learners},
        "sync": {
            "policy": "fixed", "num_fragments": 3, "sync_every": 4, "fragment_sync_delay": 2, "quorum": learners,
        },
        "merge": {"rule": "mean"},
        "outer": {"rule": "sgd", "lr": 1.0},
        "wire": {"codec_up": "fp32", "codec_down": "fp32"},
    }  # fmt: skip
    overrides = [(f"{t}.{k}", v) for source in (plain, tables) for t, keys in source.items() for k, v in keys.items()]
    return configs.validate(configs.resolve(configs.default(), overrides=overrides))


class NumpyParameters:
    """Live parameters as one flat array a fragment."""

    def __init__(self):
        self.values = {}
        self.optimizer_resets = 0

    def read(self, fragment):
        return self.values[fragment.index].copy()

    def add(self, fragment, increment):
        self.values[fragment.index] += increment

    def write(self, fragment, values):
        self.values[fragment.index] = values.copy()

    def blend(self, fragment, towards, alpha):
        self.values[fragment.index] += np.float32(1 - alpha) * (towards - self.values[fragment.index])

    def reset_optimizer(self):
        self.optimizer_resets += 1


@dataclass
class Wire:
    """One message on its way; `to` is None for the syncer."""

    to: str | None
    sender: str
    message: bytes
    payload: bytearray | None
    tag: object


@dataclass
class Loop:
    """A training loop around a learner node; it is also the node's link."""

    name: str
    pair: "Pair"
    every: int  # ticks a step takes
    scale: float
    draw: np.random.Generator
    parameters: NumpyParameters = field(default_factory=NumpyParameters)
    worked: list = field(default_factory=list)  # float64 sums of what was added, per fragment
    is_linked: bool = False
    is_late: bool = False  # its node thread hears of a boundary only after what came in since it was passed
    bytes_up: int = 0
    bytes_down: int = 0
    process: str = "of"

    def __post_init__(self):
        pair = self.pair
        ours, theirs = mailbox()
        boxes = Boxes()
        self.training = TrainingHalf(pair.layout, ByHand(self.parameters), ours, boxes)
        self.node = LearnerNode(
            self.name, pair.layout, self, f"{self.process}-{self.name}", lambda: pair.now, theirs, boxes
        )
        self.worked = [np.zeros(fragment.size) for fragment in pair.fragments]
        self.worked_after = [[sums.copy() for sums in self.worked]]  # by step count

    @property
    def machine(self):
        return self.node.machine

    @property
    def is_running(self):
        return self.training.is_adopted and not self.machine.is_stop_asked and self.machine.state == "training"

    def send(self, message, payload=None, tag=None):
        if self.is_linked:
            body = bytearray(payload) if payload is not None else None
            self.pair.wires.append(Wire(None, self.name, msgspec.msgpack.encode(message), body, tag))

    def step(self):
        """One inner step: a known increment, then the boundary."""
        for fragment in self.pair.fragments:
            increment = self.increment(fragment)
            self.parameters.values[fragment.index] += increment
            self.worked[fragment.index] += increment
        self.worked_after.append([sums.copy() for sums in self.worked])
        self.boundary(1, STEP_TOKENS, self.every * STEP_S)

    def increment(self, fragment):
        """Multiples of 2^-14, so that float32 adds many of them without rounding; zero between the tensors."""
        flat = np.zeros(fragment.size, np.float32)
        for slot in fragment.slots:
            drawn = self.draw.normal(self.scale, self.scale, slot.size)
            flat[slot.offset : slot.offset + slot.size] = np.round(drawn * 2**14) / 2**14
        return flat

    def boundary(self, steps=0, tokens=0, step_s=0.0):
        self.training.boundary(steps, tokens, step_s)
        if not self.is_late:
            self.node.catch_up()

    def stand(self):
        self.training.stand()
        if not self.is_late:
            self.node.catch_up()

    def drift(self, p):
        """Everything this learner holds that the world does not have: θ − Θ_b and residual, less what is merged."""
        drift = self.parameters.values[p].astype(np.float64) - self.node.bases[p]
        if self.node.residuals[p] is not None:
            drift += self.node.residuals[p]
        out = self.node.outstanding.get(p)
        if out is not None and out.contribution.seq <= self.pair.settled_seq(self, p):
            drift -= codecs.decode(out.contribution.codec, np.frombuffer(out.payload, np.uint8))
        return drift


def due(machine, p):
    """Whether the next step of a learner ends with a snapshot of the fragment."""
    at = machine.positions[p].snapshot_at
    return at is not None and at <= machine.step_count + 1


def without_orders(learner, message, payload):
    """A tap: who is told of no order waits to be pulled."""
    return (msgspec.structs.replace(message, order=0) if isinstance(message, Publication) else message), payload


class Copyist(Unwatched):
    """Keeps every entry of the journal beside it."""

    def __init__(self, store, entries):
        self.store, self.entries = store, entries

    def committed(self, records):
        for fact in map(decode_fact, records):
            if isinstance(fact, Committed):
                self.entries[fact.result.entry] = self.store.entry(Place(*fact.result.entry))


class Pair:
    """The syncer, the learners and the wires between them."""

    def __init__(self, root, config, tensors=TENSORS):
        self.root, self.now, self.ticks = root, 0.0, 0
        self.layout = layout_of(tensors)
        self.fragments = split(self.layout, config.sync.num_fragments, config.sync.cut_tensors)
        draw = np.random.default_rng(11)
        self.arrays = {t.name: np.round(draw.normal(size=t.shape) * 2**10).astype(np.float32) / 2**10 for t in tensors}
        self.genesis = [gather(fragment, self.arrays) for fragment in self.fragments]
        self.loops = {}
        self.wires = deque()
        self.tap = lambda learner, message, payload: (message, payload)
        self.contributions = {}  # (learner, life, seq) -> (message, payload) as the syncer got it
        self.publications = []  # (learner, message) as they were handed to learners
        self.dismissed = []
        self.entries = {}  # place -> what the journal had there when it was written: it lets go of what nobody needs
        with Store.open(root, clock=lambda: self.now) as store:
            if not store.records:  # else it goes on with the run that is there, whose first values are others
                begin(store, config, self.layout, lambda fragment: gather(fragment, self.arrays))
        self._open()

    def _open(self):
        self.store = Store.open(self.root, clock=lambda: self.now)
        self.syncer = SyncerNode(self.store, self, lambda: self.now, observer=Copyist(self.store, self.entries))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.store.close()

    # ------------------------------------------------------------------------------------------ who takes part

    def join(self, name, every=1, scale=2**-6, kind=Loop):
        """A learner that takes a step every so many ticks; it holds every fragment on return."""
        seed = np.random.default_rng([len(self.loops), 5])
        loop = self.loops[name] = kind(name, self, every, scale, seed)
        self.link(name)
        loop.boundary()  # no time passes, so that learners that join one after the other begin together
        self.deliver()
        self.until(lambda: loop.training.is_adopted)
        return loop

    def link(self, name):
        loop = self.loops[name]
        loop.is_linked = True
        loop.node.relinked()
        if loop.machine is None:
            loop.send(loop.node.hello(0))
        else:
            loop.node.handle(Linked())
        self.deliver()

    def unlink(self, name):
        loop = self.loops[name]
        loop.is_linked = False
        self.wires = deque(w for w in self.wires if name not in (w.to, w.sender))
        loop.node.handle(Unlinked())
        self._tell(Departed(name, loop.machine.life))
        self.deliver()

    def restart(self):
        """The syncer's process ends without a word and another takes over the directory."""
        for loop in self.loops.values():
            loop.is_linked = False
            loop.node.handle(Unlinked())
        self.wires.clear()
        self.store.close()
        self._open()
        for name in self.loops:
            self.link(name)

    # ------------------------------------------------------------------------------------------ time

    def tick(self):
        """One tick of the clock: whoever is due steps, messages are delivered, both sides notice the time."""
        self.ticks += 1
        self.now += STEP_S
        for loop in self.loops.values():
            if loop.is_running and self.ticks % loop.every == 0:
                loop.step()
            elif not loop.is_running:
                loop.stand()
            self.deliver()
        for loop in self.loops.values():
            if loop.machine is not None:
                loop.node.catch_up()
                loop.node.handle(Ticked())
        self.syncer.look(self.now)
        self.deliver()

    def run(self, ticks):
        for _ in range(ticks):
            self.tick()

    def until(self, condition):
        for _ in range(TICKS_MAX):
            if condition():
                return
            self.tick()
        raise AssertionError(f"{TICKS_MAX} ticks were not enough: {self.syncer.machine}")

    def close(self):
        """Go on to the end of the budget and through the closing merge, until every learner has the last versions."""
        self.until(lambda: self.syncer.machine.state.phase in ("closing", "closed"))
        closing = set()

        def is_over():
            for name, loop in self.loops.items():
                if loop.machine.is_stop_asked and name not in closing:
                    closing.add(name)
                    loop.node.handle(Closing())
                    self.deliver()
            return self.syncer.finished and all(loop.machine.is_done and self.is_current(loop) for loop in linked)

        linked = [loop for loop in self.loops.values() if loop.is_linked]
        self.until(is_over)
        for loop in linked:
            loop.boundary()

    def is_current(self, loop):
        return [p.base_version for p in loop.machine.positions] == self.versions

    # ------------------------------------------------------------------------------------------ messages

    def send(self, learner, life, message, payload, tag):
        """The syncer's outbox: nothing leaves before all that is in the log is durable."""
        self.syncer.log.then(partial(self._send, learner, message, payload, tag))

    def _send(self, learner, message, payload, tag):
        """What is sent to a learner that is not there is lost."""
        if self.loops[learner].is_linked:
            body = bytearray(payload) if payload is not None else None
            self.wires.append(Wire(learner, "", msgspec.msgpack.encode(message), body, tag))

    def dismiss(self, learner, life, refused):
        self.dismissed.append((learner, refused.text))

    def deliver(self):
        while self.wires:
            wire = self.wires.popleft()
            if wire.to is None:
                self._to_syncer(wire)
            else:
                self._to_learner(wire)

    def _tell(self, event):
        self.syncer.handle(event, self.now)
        self.syncer.look(self.now)

    def _to_syncer(self, wire):
        message = msgspec.msgpack.decode(wire.message, type=LearnerMessage)
        if wire.tag is not None:
            self.loops[wire.sender].node.sent(*wire.tag)
        tapped = self.tap(wire.sender, message, wire.payload)
        if tapped is None:
            return
        match tapped[0]:
            case Hello() as hello:
                self._tell(Joined(hello.learner, hello.process, hello.life))
            case Report() as report:
                self._tell(Reported(report))
            case Contribution() as c:
                self.contributions[c.learner, c.life, c.seq] = (c, bytes(tapped[1]))
                self.syncer.contribution(c, tapped[1])
                self.syncer.look(self.now)

    def _to_learner(self, wire):
        message = msgspec.msgpack.decode(wire.message, type=SyncerMessage)
        tapped = self.tap(wire.to, message, wire.payload)
        if tapped is not None:
            if isinstance(message, Publication):
                self.publications.append((wire.to, message))
            self.loops[wire.to].node.told(*tapped)
        if wire.tag is not None:
            self._tell(PublicationSent(wire.to, message.life, *wire.tag))

    # ------------------------------------------------------------------------------------------ what a test looks at

    @property
    def versions(self):
        return [fragment.version for fragment in self.syncer.machine.state.fragments]

    @property
    def commits(self):
        facts = (decode_fact(record.body) for record in self.store.history())
        return [fact for fact in facts if isinstance(fact, Committed)]

    @property
    def decisions(self):
        return [commit.decision for commit in self.commits]

    def settled_seq(self, loop, p):
        return self.syncer.machine.state.ledger.settled(loop.name, loop.machine.life, p).seq

    def master(self, p):
        values = self.syncer.values[p]
        return values.theta.astype(np.float64) + values.error

    def decoded(self, row):
        """What a merged row carried, as the syncer decoded it."""
        c, payload = self.contributions[row.learner, row.life, row.seq]
        return codecs.decode(c.codec, np.frombuffer(payload, np.uint8))

    def merged_work(self, name, p):
        """The sum of everything of this learner that is in the global fragment, each contribution whole."""
        total = np.zeros(self.fragments[p].size)
        for decision in self.decisions:
            for row in decision.rows:
                if (row.learner, row.fragment, row.fate) == (name, p, MERGED):
                    total += self.decoded(row)
        return total

    def booked_work(self, p):
        """Σ over merges of gain · Σ w v / Σ w: what a mean with outer step 1 would have added without rounding."""
        return sum((self.merged(c.decision) for c in self.commits_of(p)), start=np.zeros(self.fragments[p].size))

    def rounding(self, p):
        """What was added by rounding the merged deltas to what the journal holds, and by nothing else."""
        total = np.zeros(self.fragments[p].size)
        for commit in self.commits_of(p):
            exact, applied = self.merged(commit.decision), self.applied(commit)
            np.testing.assert_allclose(applied, exact, rtol=2**-8, atol=1e-7)
            total += applied - exact
        return total

    def commits_of(self, p):
        return [commit for commit in self.commits if commit.decision.fragment == p]

    def merged(self, decision):
        rows = [row for row in decision.rows if row.fate == MERGED]
        shares = [part.weight / sum(part.weight for part in decision.parts) for part in decision.parts]
        return decision.gain * sum(s * self.decoded(row).astype(float) for s, row in zip(shares, rows, strict=True))

    def applied(self, commit):
        """The merged delta of a commit as the journal has it."""
        entry = self.entries[commit.result.entry]
        return codecs.decode(commit.decision.delta, np.frombuffer(entry, np.uint8)).astype(float)

    def values_of(self):
        """Every version by fragment and number, done again from the first."""
        found = {(p, 0): Values(theta, 0 * theta, 0 * theta) for p, theta in enumerate(self.genesis)}
        for commit in self.commits:
            d = commit.decision
            entry = self.entries[commit.result.entry]
            old = found[d.fragment, d.version - 1]
            found[d.fragment, d.version] = FLOAT32.advance(d, self.fragments[d.fragment], old, entry).values
        return found


def behind_and_due(pair):
    """A learner whose next step ends with a snapshot of fragment 0, and the versions of it that are kept from it."""
    late = pair.join("late")  # steps first in a tick, so that a pull waits for the next
    pair.tap = without_orders
    pair.join("other")
    pair.run(20)
    kept_back = []

    def tap(learner, message, payload):
        if isinstance(message, Publication) and (learner, message.fragment) == ("late", 0):
            kept_back.append((message, payload))
            return None
        return message, payload

    pair.tap = tap
    pair.until(lambda: kept_back and due(late.machine, 0))
    return late, kept_back
