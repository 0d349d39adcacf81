"""What a hostile syncer says harms no learner: it ends in order or trains on, and reads, writes and runs nothing.

The learner is a real one, its node in a thread or a process; the syncer is spoken by hand over real sockets.
"""

import logging
import math
import random
from typing import get_args

import msgspec
import numpy as np
import pytest

from shell.hand import Hand, at_once, is_over, learner_of
from skerry import config as configs
from skerry.algo.fragments import encode_fragments
from skerry.core.messages import (
    COUNT_MAX,
    FULL,
    Done,
    Hello,
    Lend,
    Publication,
    Pull,
    Refused,
    Rejected,
    Report,
    Stop,
    Welcome,
)
from skerry.core.vocabulary import Refusal
from skerry.errors import ConfigError, ProtocolError, RefusedError
from skerry.node.algebra import FLOAT32
from skerry.shell.learner import fetch_config
from skerry.wire import frames
from skerry.wire.frames import Parser, learner_dialect
from skerry.wire.transport import Lost

replace = msgspec.structs.replace

WELCOME = Welcome("run", 1, "here", 1, 0, b"{}", b"[]", 0, 0, 0.0)
PUBLICATION = Publication(1, 1, 0, 1, FULL, "fp32", b"d" * 16, 0, 0, 0.0)
MESSAGES = [WELCOME, Pull(1, 1, 0, 0, False, 0.0), PUBLICATION, Rejected(1, 1, 0, 1, "duplicate", True), Stop(1, 1),
            Done(1, 1), Lend(0, 0)]  # fmt: skip


def read(message):
    """What a learner reads of it, as a peer could write it that cares for no bound."""
    parser = Parser(learner_dialect(lambda message: 4))
    parser.legal = frames.CONTROL_LINE | frames.BULK_LINE
    is_bulk = isinstance(message, Publication)
    body = msgspec.msgpack.encode((1, 4, message) if is_bulk else message)
    return parser.feed(frames._frame(frames.BULK if is_bulk else frames.MESSAGE, body))


@pytest.mark.parametrize("whole", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_number_that_no_syncer_counts_to_is_not_decoded(whole):
    read(whole)
    for name in whole.__struct_fields__:
        value = getattr(whole, name)
        wrong = (-2, COUNT_MAX + 1, 2**64 - 1) if type(value) is int else ()
        for number in wrong + ((math.inf, math.nan, -1.0) if type(value) is float else ()):
            with pytest.raises(ProtocolError, match="cannot decode a frame"):
                read(replace(whole, **{name: number}))
    for text in ("x" * 2**20, "\x1b[31m"):
        if isinstance(whole, Welcome):
            with pytest.raises(ProtocolError):
                read(replace(whole, run=text))


def test_a_configuration_that_no_run_has_is_not_taken():
    fine = configs.encode(configs.Config(run=configs.Run(steps=1)))
    assert configs.offered(fine).run.steps == 1
    for wrong in (
        b"", b"{", b"\xff", b"[" * 10**5, b'{"run":{"steps":1,"strange":1}}', b'{"run":{"steps":1e400}}',
        b'{"run":{"steps":1},"wire":{"heartbeat_s":-1}}', b'{"run":{"steps":1},"model":{"width":1e9}}',
        b'{"run":{"steps":1,"name":"\\u001b[31m"}}', b'{"run":{"steps":' + b"9" * 5000 + b"}}", b'{"run":7}',
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            configs.offered(wrong)


def test_who_asks_what_is_trained_and_hears_nonsense_is_told_so_in_one_line():
    from skerry.core.messages import Answer, Ask

    hand = Hand()
    try:

        def answer():
            hand.hear(Ask)
            hand.say(Answer("run", b'{"run":{"steps":1},"learner":{"lr":1e300}}'))

        at_once(answer)
        with pytest.raises(ProtocolError, match="no run is configured with"):
            fetch_config("127.0.0.1", hand.server.port, None, 60.0)
    finally:
        hand.server.close()


@pytest.fixture(params=["thread", "process"])
def pair(request):
    """A learner that has joined a syncer spoken by hand, and its loop may step."""
    hand = Hand()
    learner = learner_of(request.param, "127.0.0.1", hand.server.port)
    try:
        starting = at_once(lambda: learner.start(60.0))
        hand.take_in()
        assert is_over(starting)
        yield hand, learner
    finally:
        learner.abandon()
        hand.server.close()


def wrong_welcomes(hand):
    right = Welcome("run", 1, "here", 1, 0, configs.encode(hand.config), encode_fragments([hand.fragment]), 0, 0, 0.0)
    yield replace(right, life=2)  # to a process that is life 1
    yield replace(right, learner="another")
    yield replace(right, life=0)


def test_a_welcome_that_cannot_be_hangs_up_and_the_loop_trains_on(pair, caplog):
    hand, learner = pair
    caplog.set_level(logging.INFO)
    for wrong in wrong_welcomes(hand):
        hand.say(wrong)
        hand.hear(Lost)
        assert learner.step(8), "nothing that was said stops the loop"
        hand.hear(Hello)  # it dials again
        hand.say(Welcome("run", 1, "here", 1, 0, configs.encode(hand.config), encode_fragments([hand.fragment]),
                         0, 0, 0.0))  # fmt: skip
        hand.hear(Report)
    assert "broke the protocol" in caplog.text


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_first_welcome_to_no_run_is_hung_up_on_until_a_right_one_comes(kind):
    hand = Hand()
    learner = learner_of(kind, "127.0.0.1", hand.server.port)
    try:
        starting = at_once(lambda: learner.start(60.0))
        right = Welcome("run", 1, "here", 1, 0, configs.encode(hand.config), encode_fragments([hand.fragment]), 0, 0,
                        0.0)  # fmt: skip
        for wrong in (
            replace(right, config=b"{"), replace(right, config=b'{"run":{"steps":-1}}'), replace(right, fragments=b"["),
            replace(right, fragments=b"[]"), replace(right, fragments=b'[[["w",0,301,0]]]'),
            replace(right, fragments=b'[[["w",0,300,-512]]]'),
        ):  # fmt: skip
            hand.hear(Hello)
            hand.say(wrong)
            hand.hear(Lost)
        hand.take_in()
        assert is_over(starting) and learner.step(8)
    finally:
        learner.abandon()
        hand.server.close()


def drawn(draw, hand, count):
    """A message of any kind, legal by its types and by nothing else, and its payload."""
    number = lambda: draw.choice([0, 0, 1, 1, 2, 3, 17, 2**31, COUNT_MAX])  # noqa: E731
    share = lambda: draw.choice([0.0, 0.5, 1.0])  # noqa: E731
    which = draw.randrange(6)
    if which == 0:
        return Pull(number(), 1, number(), number(), draw.random() < 0.5, share(), number()), None
    if which == 1:
        return Rejected(number(), 1, number(), number(), draw.choice(get_args(Refusal)),
                        draw.random() < 0.5), None  # fmt: skip
    if which == 2:
        return Lend(number(), number()), None
    if which == 3:
        return Welcome("run", number(), draw.choice(["here", "there"]), draw.choice([0, 1, 1, 2]), number(), b"{",
                       b"[", number(), number(), share(), (number(),) * draw.randrange(3)), None  # fmt: skip
    values = np.full(hand.fragment.size, draw.choice([0.0, 1e-3, 1e30, math.inf, math.nan]), np.float32)
    digest = FLOAT32.digest(values) if draw.random() < 0.7 else draw.randbytes(draw.choice([0, 8, 16, 32]))
    base = draw.choice([FULL, FULL, 0, 1])
    codec = "fp32" if base == FULL or draw.random() < 0.5 else hand.config.wire.codec_down
    size = FLOAT32.payload_bytes(codec, hand.fragment)
    payload = values.tobytes() if codec == "fp32" else draw.randbytes(size)
    said = Publication(number(), 1, 0, count + draw.choice([0, 1, 20]), base, codec, digest, number(), number(),
                       share(), draw.choice([0, 1, 4, COUNT_MAX]), draw.choice([0.0, 1.0, 2.0**53]))  # fmt: skip
    return said, payload


def hellos(hand):
    """Who has dialled again since the last look."""
    while not hand.inbox.empty():
        event = hand.inbox.get_nowait()
        if isinstance(getattr(event, "message", None), Hello):
            hand.peer = event.peer
            yield event.peer


@pytest.mark.parametrize("seed", range(3))
def test_whatever_a_syncer_says_the_loop_steps_on_or_ends_in_order(pair, seed):
    hand, learner = pair
    draw, table = random.Random(seed), encode_fragments([hand.fragment])
    for count in range(1, 150):
        for _ in hellos(hand):
            hand.say(Welcome("run", 1, "here", 1, 0, configs.encode(hand.config), table, 0, 0, 0.0))
            hand.publish(count + 100)
        message, payload = drawn(draw, hand, count)
        hand.say(message, payload)
        assert learner.step(8), f"seed {seed}, message {count}: {message}"
        assert not learner.beside.obituary, learner.beside.obituary
    last = Refused("enough\x1b[31m " + "x" * 9000, "unfit")
    hand.say(last)
    with pytest.raises(RefusedError) as refused:
        while learner.step(8):
            for _ in hellos(hand):
                hand.say(last)
    assert "\x1b" not in str(refused.value) and len(str(refused.value)) <= 300
