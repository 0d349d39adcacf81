"""Nothing that a peer says stops a syncer or spoils a run's books: every field wrong by itself, and many at random.

The peer has proved the token and was welcomed. What it says goes through real frames, a real node and a real store; at
the end the run is closed, and its tape is opened again and audited.
"""

import math
import tempfile
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from node.test_peers import Caller, House
from skerry.core.admission import SUM_MAX, contradiction, names_max, work_max
from skerry.core.audit import Audit
from skerry.core.facts import Seen, Stretch
from skerry.core.ledger import Account, Ledger, Settled
from skerry.core.messages import (
    COUNT_MAX,
    FULL,
    PROTOCOL,
    Buffers,
    Contribution,
    FragmentPosition,
    Hello,
    Refused,
    Report,
)
from skerry.core.state import decode_fact
from skerry.errors import LINE_CHARS_MAX, ProtocolError
from skerry.store import Store
from skerry.wire import frames
from skerry.wire.frames import Parser, syncer_dialect
from skerry.wire.transport import Lost

replace = msgspec.structs.replace

POSITION = FragmentPosition(FULL, 0, 0, 0)
REPORT = Report("a", 1, 1, 0, 0, 0.0, "training", (POSITION,) * 3)
HELLO = Hello(PROTOCOL, "a", "p", 0, b"", "d")
CONTRIBUTION = Contribution("a", 1, 1, 0, 0, 0, 0, 4, 32, "fp32", b"d" * 16)
BUFFERS = Buffers("a", 1, 4, 32, b"")
WRONG = {
    int: (-2, COUNT_MAX + 1, 2**63, 2**64 - 1),
    float: (math.inf, -math.inf, math.nan, -1.0, 1e300),
    str: ("x" * 2**20,),
    bytes: (bytes(9 << 20),),
}


# ---------------------------------------------------------------------------------------------- one field


def read(message):
    """What a syncer reads of it, as a peer could write it that cares for no bound."""
    parser = Parser(syncer_dialect(lambda message: 4))
    parser.legal = frames.CONTROL_LINE | frames.BULK_LINE
    is_bulk = isinstance(message, Contribution)
    body = msgspec.msgpack.encode((1, 4, message) if is_bulk else message)
    header = frames._header(frames.BULK if is_bulk else frames.MESSAGE, len(body), frames._checksum(body))
    return parser.feed(header + body)


@pytest.mark.parametrize("whole", [REPORT, HELLO, CONTRIBUTION, BUFFERS], ids=lambda whole: type(whole).__name__)
def test_a_field_out_of_bounds_is_not_decoded(whole):
    read(whole)
    bounded = {f.name: get_args(f.type)[0] for f in msgspec.structs.fields(type(whole)) if get_args(f.type)}
    assert {f.name for f in msgspec.structs.fields(type(whole))} - bounded.keys() <= {"loss", "alone"}, "all else"
    for name, kind in bounded.items():
        for wrong in WRONG.get(kind, ("\x1b[31m",)):
            with pytest.raises(ProtocolError, match=r"cannot decode a frame|legal are 1 to"):
                read(replace(whole, **{name: wrong}))


def test_a_position_out_of_bounds_is_not_decoded():
    for name in ("base_version", "mark_step", "mark_tokens", "outstanding_seq", "order"):
        for wrong in WRONG[int]:
            with pytest.raises(ProtocolError, match="cannot decode a frame"):
                read(replace(REPORT, positions=(replace(POSITION, **{name: wrong}),)))


@pytest.mark.parametrize(
    "layout",
    [
        b"[" * 10**6,
        b'{"tensors":[{"name":"\xff","shape":[1]}]}',
        b'{"tensors":[{"name":"a","shape":[' + b"9" * 5000 + b"]}]}",
        b'{"tensors":[{"name":"a","shape":[' + b",".join([b"1"] * 10**6) + b"]}]}",
        b'{"tensors":[{"name":"bias","shape":[' + b",".join([b"1"] * 10**6) + b"]}]}",
        b'{"tensors":[{"name":"' + b"n" * 10**6 + b'","shape":[1]}]}',
        b"{}",
        b"\xff",
    ],
    ids=["deep", "no UTF-8", "a long number", "a long shape", "a long shape of ours", "a long name", "empty", "junk"],
)
def test_a_hello_with_a_strange_layout_costs_its_sender_the_connection_and_a_short_word(tmp_path, layout):
    house = House(tmp_path)
    caller = Caller(house)
    heard = caller.say(caller.hello(layout=layout, layout_digest="other"))
    assert not caller.is_in and isinstance(heard[-1], Lost)
    assert all(len(message.text) <= LINE_CHARS_MAX for message in heard if isinstance(message, Refused))
    other = Caller(house, name="b")
    other.say(other.hello())
    assert other.is_in, "others are not concerned"


# ---------------------------------------------------------------------------------------------- beside what is known


def test_tokens_grow_with_steps_and_only_with_them():
    ledger = Ledger(2, {"a/1": Account([Settled(), Settled()], step=10, tokens=100)}, steps=10, produced=200)
    for step, tokens, is_fine in [
        (10, 100, True), (11, 101, True), (9, 90, True), (0, 0, True),
        (10, 101, False), (10, 99, False), (11, 99, False), (9, 101, False), (0, 101, False),
    ]:  # fmt: skip
        assert (contradiction("a", 1, step, tokens, ledger, 10**6) == "") == is_fine, (step, tokens)
    assert "0 in 0" in contradiction("b", 1, 0, 10, ledger, 10**6), "tokens before the first step"


def test_a_run_counts_no_further_than_its_tape_can_write_and_nobody_fills_the_books_of_others():
    most = work_max(4, 24)
    assert names_max(4) * 24 * most <= SUM_MAX < 1 << 63 and most <= COUNT_MAX, "nor what a welcome can say"
    ledger = Ledger(24)
    for life in range(1, 100):
        steps = most // 200
        assert contradiction("a", life, steps, steps, ledger, most) == ""
        ledger.see(Seen("a", life, steps, steps, 0, 0, 0.0))
    assert contradiction("a", 100, most // 200, most // 200, ledger, most) == ""
    assert "more than a run's books can hold of one learner" in contradiction("a", 100, most, most, ledger, most)
    assert contradiction("b", 1, most // 2, most // 2, ledger, most) == "", "others are not concerned"


@pytest.mark.parametrize(
    "report",
    [
        replace(REPORT, tokens=10),
        replace(REPORT, step=2, tokens=20, step_s=5e-324),
        replace(REPORT, step=2, tokens=20, positions=(replace(POSITION, mark_step=3),) * 3),
        replace(REPORT, step=2, tokens=20, positions=(replace(POSITION, mark_tokens=21),) * 3),
        replace(REPORT, step=2, tokens=20, alone=Stretch(0, 0, 3, 20)),
        replace(REPORT, step=2, tokens=20, alone=Stretch(0, 0, 2, 2**64 - 1)),
        replace(REPORT, step=2, tokens=20, alone=Stretch(-9, 0, 2, 20)),
    ],
    ids=[
        "tokens without steps",
        "a step of no time",
        "settled steps that were not taken",
        "settled tokens",
        "alone and not done",
        "alone with tokens that were not",
        "alone before the beginning",
    ],
)
def test_a_report_that_does_not_add_up_costs_its_sender_the_connection(tmp_path, report):
    house = House(tmp_path)
    caller = Caller(house)
    caller.say(caller.hello())
    assert isinstance(caller.say(report)[-1], Lost) and not caller.is_in
    assert not house.node.machine.state.ledger.totals().produced, "nothing of it is booked"
    again = Caller(house)
    again.say(again.hello(life=1))
    assert again.is_in, "who does better may come again"


# ---------------------------------------------------------------------------------------------- many at random

COUNTS = st.one_of(st.integers(0, 6), st.integers(0, 6), st.sampled_from([2**31, 2**52, COUNT_MAX - 1, COUNT_MAX]))
SECONDS = st.sampled_from([0.0, 1e-6, 1e-3, 1.0, 3600.0])
POSITIONS = st.builds(
    FragmentPosition, st.sampled_from([0, 0, 0, 0, 0, 0, 0, FULL, 1]), COUNTS, COUNTS, COUNTS, st.booleans(), COUNTS
)
REPORTS = st.builds(
    Report, st.just("a"), st.just(1), COUNTS, COUNTS, COUNTS, SECONDS,
    st.sampled_from(["training", "stopped", "leaving", "left"]), st.tuples(POSITIONS, POSITIONS, POSITIONS),
    step_gap_s_max=SECONDS, bytes_up=COUNTS, bytes_down=COUNTS, loss=st.floats(), fast_forwards=COUNTS,
    payload_bytes=COUNTS, payload_s=SECONDS, encoded=COUNTS, encode_s=SECONDS, adopted=COUNTS, adopt_s=SECONDS,
    round_steps=COUNTS, alone=st.one_of(st.just(Stretch()), st.builds(Stretch, COUNTS, COUNTS, COUNTS, COUNTS)),
    grad_norm=SECONDS,
)  # fmt: skip
CONTRIBUTIONS = st.builds(
    Contribution, st.just("a"), st.just(1), COUNTS, st.integers(0, 2), st.sampled_from([FULL, 0, 0, 1, 9]), COUNTS,
    COUNTS, COUNTS, COUNTS, st.just("fp32"), st.just(b""),
)  # fmt: skip


def fitting(message):
    """Half of what is drawn would be dropped for its marks, or for what was done alone: those are made to fit."""
    if isinstance(message, Contribution):
        return message
    steps, tokens = message.step, message.tokens
    positions = [
        replace(at, mark_step=min(at.mark_step, steps), mark_tokens=min(at.mark_tokens, tokens))
        for at in message.positions
    ]
    low, high = sorted([min(message.alone.from_step, steps), min(message.alone.to_step, steps)])
    least, most = sorted([min(message.alone.from_tokens, tokens), min(message.alone.to_tokens, tokens)])
    return replace(message, positions=tuple(positions), alone=Stretch(low, least, high, most))


class Siege:
    """One hostile learner, which comes again whenever it is dropped, and the syncer's clock."""

    def __init__(self, root):
        self.house, self.now, self.values = (
            House(root, steps=10**5, learner={"alone_steps_max": 2}),
            0.0,
            np.random.default_rng(1),
        )
        self.caller = None

    def say(self, message):
        if self.caller is None or not self.caller.is_in:
            life = 1 if self.house.lives else 0
            self.caller = Caller(self.house)
            self.caller.say(self.caller.hello(life=life))
        if not self.caller.is_in:
            return  # it is known for what it claims to hold
        payload = None
        if isinstance(message, Contribution):
            size = self.house.fragments[message.fragment].size
            payload = self.values.standard_normal(size).astype(np.float32).tobytes()
            message = replace(message, digest=xxhash.xxh3_128_digest(payload))
        self.caller.say(message, payload)
        self.pass_time(0.3)

    def pass_time(self, seconds):
        self.now += seconds
        while not self.house.inbox.empty():
            event = self.house.inbox.get_nowait()
            self.house.learners.take(event, self.now)
        self.house.node.look(self.now)

    def end(self):
        """An honest learner spends the budget, and the run is closed, whatever the other owes it."""
        honest = Caller(self.house, name="b", process="own")
        honest.say(honest.hello())
        machine = self.house.node.machine
        assert honest.is_in or machine.state.phase == "closed"
        for number in range(1, 400):
            if machine.state.phase == "closed":
                return
            step = 10**6  # so many are believed a little later
            versions = [at.version for at in machine.state.fragments]
            positions = tuple(FragmentPosition(version, 0, 0, 0) for version in versions)
            honest.say(Report("b", 1, number, step, step * 8, 0.1, "stopped", positions))
            self.pass_time(1.0)
        raise AssertionError(f"the run does not close: {machine}")


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.one_of(REPORTS, REPORTS.map(fitting), CONTRIBUTIONS), min_size=1, max_size=12))
def test_whatever_a_learner_says_the_run_ends_and_its_tape_opens(messages):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        siege = Siege(root)
        for message in messages:
            siege.say(message)
        siege.end()
        siege.house.node.machine.state.ledger.check()
        siege.house.store.close()
        with Store.open(root, readonly=True) as store:
            audit = Audit()
            for record in store.history():
                audit.take(decode_fact(record.body))
            assert audit.state.phase == "closed" and not audit.violations, audit.violations
