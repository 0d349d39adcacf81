"""100,000 messages of hostile learners against a real syncer over real sockets, beside an honest one that trains.

They hold what an honest learner holds: they prove themselves, join and speak. What they say is what was recorded of an
honest learner, out of order, twice, with other fields and other bytes (and right checksums), and messages of every kind
that are legal by their types alone. Afterwards the syncer lives, the honest learner's work was merged all along, the
run closes, and its tape is audited. SKERRY_FIRST_SEED replays a failing seed.
"""

import os
import queue
import random
import socket
import threading

import msgspec
import numpy as np
import pytest
import xxhash

from e2e.processes import FRAGMENTS, OPTIONS, POLL_S, STEP_TOKENS, WAIT_S, Puppet, Syncer, facts_of, until
from skerry.core.audit import Audit
from skerry.core.facts import Stretch
from skerry.core.messages import (
    COUNT_MAX,
    FULL,
    PROTOCOL,
    Answer,
    Ask,
    Buffers,
    Contribution,
    Done,
    FragmentPosition,
    Hello,
    Lend,
    Lent,
    Publication,
    Pull,
    Rejected,
    Report,
    Stop,
    Welcome,
)
from skerry.errors import ProtocolError
from skerry.wire import frames, handshake
from skerry.wire.frames import Attached, Challenge, Parser
from skerry.wire.handshake import Credentials

MESSAGES = 100_000
BATCH = 60  # of one connection: fewer than a new peer may send at once, so that none is held back
HOSTILE = ("mallory", "oscar", "trudy")
SEED = int(os.environ.get("SKERRY_FIRST_SEED", "0"))
WILD = [0, 1, -1, 255, 2**31, 2**53, 2**53 + 1, 2**63, 2**64 - 1, 0.0, -0.0, 5e-324, 1e308, float("inf"), float("nan"),
        "", "\x1b[31m", "x" * 5000, b"", b"\xff" * 40, None, True, [], {}, [[[[]]]], ["a"] * 300]  # fmt: skip


class Recorded(Puppet):
    """An honest learner of which everything that it says is kept."""

    def __init__(self, port, name):
        self.said = []
        super().__init__(port, name)

    def record(self, merges):
        send = self.client.send

        def keeping(peer, message, payload=None, *rest):
            self.said.append((message, payload))
            send(peer, message, payload, *rest)

        self.client.send = keeping
        for _ in range(merges):
            self.merge_once()
        return self.said


class Line:
    """One hostile learner's connections, by hand: a control line, and a bulk line where it has payloads to send."""

    def __init__(self, port, name, place, puppet):
        self.port, self.name, self.place, self.puppet = port, name, place, puppet
        self.process, self.life, self.joined = os.urandom(8).hex(), 0, 0

    def dial(self, session=b""):
        """A connection that is let in; what was answered."""
        sock = socket.create_connection(("127.0.0.1", self.port), WAIT_S, source_address=(self.place, 0))
        parser = Parser(frames.learner_dialect(lambda message: 0))
        mine, nonce = Credentials(None, PROTOCOL), os.urandom(frames.NONCE_BYTES)
        while True:
            item = self.heard(sock, parser)
            if isinstance(item, Challenge):
                sock.sendall(frames.encode(handshake.answer(mine, nonce, item, session)))
            elif isinstance(item, Attached):
                parser.legal = frames.CONTROL_LINE | frames.BULK_LINE
                return sock, parser, item
            else:
                sock.close()
                return None

    def heard(self, sock, parser):
        while True:
            count = sock.recv_into(parser.buffer())
            if not count:
                return None
            if (item := parser.received(count)) is not None:
                return item

    def hello(self):
        layout = self.puppet.layout
        return Hello(PROTOCOL, self.name, self.process, self.life, msgspec.json.encode(layout), layout.digest)

    def say(self, fuzz):
        """Join, say a batch, and wait until the other side has read it or hung up; how many messages that were."""
        if (let_in := self.dial()) is None:
            return 0
        sock, parser, attached = let_in
        with sock:
            sock.sendall(frames.encode(self.hello()))
            try:
                item = self.heard(sock, parser)
            except (ProtocolError, ConnectionError):
                return 1
            welcome = getattr(item, "message", None)
            if not isinstance(welcome, Welcome):
                return 1
            self.life, self.joined = welcome.life, self.joined + 1
            control, bulk = fuzz.batch(self)
            second = self.dial(attached.session) if bulk else None
            try:
                if second is not None:
                    second[0].sendall(b"".join(bulk))
                sock.sendall(b"".join(control))
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1 << 16):  # a reset would lose what is on its way
                    pass
            except OSError:
                pass
            finally:
                if second is not None:
                    second[0].close()
        return 1 + len(control) + len(bulk)


class Fuzz:
    """Draws what hostile learners say, from a seed."""

    def __init__(self, seed, recorded, puppet):
        self.draw, self.recorded, self.puppet = random.Random(seed), recorded, puppet

    def batch(self, line):
        """Frames for the control and the bulk line; what most likely ends the connection comes last."""
        control = [self.control(line) for _ in range(BATCH // 2)]
        control += self.draw.choices(control, k=BATCH // 2 - 4)  # once more, in another order
        bulk = [self.bulk(line) for _ in range(self.draw.randrange(4))]
        return [*control, self.mangled(line), self.junk(line)], bulk

    def control(self, line):
        return frames.encode(self.draw.choice([self.report, self.report, self.replayed])(line))

    def small(self):
        return self.draw.choice([0, 0, 1, 2, 3, 6])

    def report(self, line, **other):
        steps = self.small()
        position = FragmentPosition(self.draw.choice([FULL, 0, 0, 1]), self.draw.randint(0, steps), 0,
                                    self.small(), self.draw.random() < 0.1, self.small())  # fmt: skip
        return Report(line.name, line.life, self.draw.randrange(10**6), steps, steps * STEP_TOKENS,
                      self.draw.choice([1e-6, 0.1, 3600.0]), self.draw.choice(["training", "stopped", "leaving"]),
                      (position,) * FRAGMENTS, loss=self.draw.choice([0.0, -1.0, 1e308]),
                      bytes_up=self.draw.choice([0, COUNT_MAX]))  # fmt: skip

    def replayed(self, line):
        """What an honest learner once said, in this one's name; its work is let be, for claims that add up spend."""
        reports = [message for message, _ in self.recorded if isinstance(message, Report)]
        message = self.draw.choice(reports)
        return msgspec.structs.replace(message, learner=line.name, life=line.life, step=0, tokens=0,
                                       positions=(FragmentPosition(0, 0, 0, 0),) * FRAGMENTS)  # fmt: skip

    def bulk(self, line):
        """A contribution: recorded or drawn, with its bytes or others."""
        fragment = self.draw.randrange(FRAGMENTS)
        size = self.puppet.fragments[fragment].size
        payload = np.full(size, self.draw.choice([0.0, 1e-3, 1e30, np.nan, np.inf]), np.float32).tobytes()
        digest = xxhash.xxh3_128_digest(payload) if self.draw.random() < 0.8 else self.draw.randbytes(16)
        low, high = sorted([self.small(), self.small()])
        message = Contribution(line.name, line.life, self.draw.choice([1, 2, 3, COUNT_MAX]), fragment,
                               self.draw.choice([FULL, 0, 1, 9, COUNT_MAX]), low, low * STEP_TOKENS, high,
                               high * STEP_TOKENS, "fp32", digest)  # fmt: skip
        parts = frames.encode_bulk(self.draw.randrange(4), message, frames.flat(payload))
        return b"".join(bytes(part) for each in parts for part in each)

    def mangled(self, line):
        """Of every kind, and with what no honest learner says in it; the checksum is right."""
        kind = self.draw.choice([self.other_field, self.other_field, self.other_bytes, self.any_kind, self.junk])
        return kind(line)

    def other_field(self, line):
        buffers = Buffers(line.name, line.life, 1, 10, b"data")
        whole = self.draw.choice([self.report(line), line.hello(), buffers, Ask()])
        fields = msgspec.to_builtins(whole, builtin_types=(bytes,)) | {"type": type(whole).__name__}
        for _ in range(self.draw.randint(1, 2)):
            name = self.draw.choice([*fields, "unheard of"])
            fields[name] = self.draw.choice(WILD)
        if isinstance(fields.get("step"), int) and 6 < fields["step"] <= COUNT_MAX:
            fields["step"] = 6  # work that adds up spends the run's budget, and nobody can see that it was not done
        return frames._frame(frames.MESSAGE, msgspec.msgpack.encode(fields))

    def other_bytes(self, line):
        body = bytearray(msgspec.msgpack.encode(self.draw.choice([self.report(line), line.hello()])))
        for _ in range(self.draw.randint(1, 8)):
            body[self.draw.randrange(len(body))] = self.draw.randrange(256)
        del body[self.draw.randrange(1, len(body) + 1) :]
        return frames._frame(self.draw.choice([frames.MESSAGE, frames.BULK, frames.HANDSHAKE]), bytes(body))

    def any_kind(self, line):
        message = self.draw.choice([
            Welcome("r", 1, line.name, 1, 0, b"{}", b"[]", 0, 0, 0.0), Answer("r", b"{}"), Stop(1, 1), Done(1, 1),
            Pull(1, 1, 0, 0, False, 0.0), Publication(1, 1, 0, 1, FULL, "fp32", b"", 0, 0, 0.0), Lend(0, 0),
            Rejected(1, 1, 0, 1, "duplicate", True), Lent(line.name, 0, 0, b""), line.hello(),
            Report("puppet", 1, 10**6, 6, 60, 0.1, "left", (FragmentPosition(0, 0, 0, 0),) * FRAGMENTS),
            self.report(line), Buffers(line.name, line.life, 6, 60, b"\xff" * 99),
            msgspec.structs.replace(self.report(line), alone=Stretch(0, 0, 6, COUNT_MAX)),
        ])  # fmt: skip
        return frames._frame(frames.MESSAGE, msgspec.msgpack.encode(message))

    def junk(self, line):
        chunk = frames._frame(frames.CHUNK, bytes(32))
        return self.draw.choice([self.draw.randbytes(99), chunk, b"GET / HTTP/1.1\r\n"])


def merging(puppet, is_over, made):
    """An honest learner at work, until it is told to stop."""
    while not is_over.is_set():
        made.append(puppet.merge_once())


def spend(puppet):
    """Its work is more than the budget: the run is over, and closes."""
    while True:
        try:
            event = puppet.inbox.get(timeout=POLL_S)
        except queue.Empty:
            puppet.step += 20_000
            puppet._report()
            continue
        if isinstance(getattr(event, "message", None), Stop | Done):
            return


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_syncer_outlives_whatever_is_said_to_it(tmp_path):
    options = [*OPTIONS, "--run.steps=100000", "--run.learners=4", "--sync.close_timeout_s=1"]
    said, made, is_over = 0, [], threading.Event()
    with Syncer(tmp_path, options=options) as syncer:
        with Recorded(syncer.port, "scribe") as scribe:
            recorded = scribe.record(3)
        with Puppet(syncer.port) as puppet:
            lines = [Line(syncer.port, name, f"127.0.0.{n + 2}", puppet) for n, name in enumerate(HOSTILE)]
            fuzz = Fuzz(SEED, recorded, puppet)
            honest = threading.Thread(target=merging, args=(puppet, is_over, made), daemon=True)
            honest.start()
            while said < MESSAGES:
                line = fuzz.draw.choice(lines)
                said += line.say(fuzz)
                assert syncer.process.poll() is None, f"SKERRY_FIRST_SEED={SEED}: after {said} messages: {syncer.said}"
                assert honest.is_alive(), f"SKERRY_FIRST_SEED={SEED}: the honest learner ended after {said} messages"
            before = len(made)
            until(lambda: len(made) >= before + 3, "merges to go on")
            is_over.set()
            honest.join(WAIT_S)
            spend(puppet)
        assert syncer.wait() == 0, syncer.said
    assert len(made) > 20 and all(line.joined > 20 for line in lines), "both took part"
    assert "Traceback" not in syncer.said and syncer.said.isascii() and "\x1b" not in syncer.said
    audit = Audit()
    for fact in facts_of(syncer.run_dir):
        audit.take(fact)
    assert audit.state.phase == "closed" and not audit.violations, (SEED, audit.violations)
    audit.state.ledger.check()
