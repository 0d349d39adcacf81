"""Frames: any split of the stream gives the same messages; anything else gives ProtocolError and nothing more."""

import itertools
import random
import struct
import tracemalloc
import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry import errors
from skerry.core.facts import Stretch
from skerry.core.messages import (
    PROTOCOL,
    Buffers,
    Contribution,
    Done,
    DropLearner,
    ExtendRun,
    FinishRun,
    FragmentPosition,
    Hello,
    PauseRun,
    Publication,
    ReadmitLearner,
    Report,
    SetKeys,
    Welcome,
)
from skerry.errors import ProtocolError
from skerry.wire import frames
from skerry.wire.frames import (
    CHUNK_BYTES,
    Attach,
    Challenge,
    Parser,
    Proof,
    encode,
    encode_bulk,
    learner_dialect,
    syncer_dialect,
)
from wire.samples import sample

HELLO = sample(Hello, protocol=PROTOCOL, learner="fern", layout=b"layout" * 10, frozen={"base.weight": b"digest"})
REPORT = sample(Report, learner="fern", positions=(FragmentPosition(0, 1, 2, 3), FragmentPosition(1, 2, 3, 4)))
BUFFERS = sample(Buffers, learner="fern", step=3, data=b"values")


def contribution(payload_bytes, seq=1):
    """A contribution whose legal payload length is its token count, as far as these tests' `limit` goes."""
    return sample(Contribution, learner="fern", seq=seq, to_tokens=payload_bytes, codec="fp32", digest=b"d" * 16)


def limit(message):
    return message.to_tokens


def open_parser(payload_limit=limit):
    parser = Parser(syncer_dialect(payload_limit))
    parser.legal = frames.CONTROL_LINE | frames.BULK_LINE
    return parser


def bulk(transfer, message, payload):
    """The frames of a bulk message, each as bytes: the announcement, then the chunks."""
    return [b"".join(buffers) for buffers in encode_bulk(transfer, message, memoryview(payload))]


def raw(kind, body, **fields):
    """A frame with a right header check, whatever else is wrong with it."""
    values = dict(magic=frames.MAGIC, version=1, kind=kind, reserved=0, length=len(body), checksum=None) | fields
    if values["checksum"] is None:
        values["checksum"] = frames._checksum(body)
    header = frames.HEADER.pack(*values.values())
    return header + struct.pack("<I", zlib.crc32(header)) + body


def seen(items):
    return [(item.message, None if item.payload is None else bytes(item.payload)) for item in items]


def test_messages_and_payloads_round_trip():
    payload = random.Random(1).randbytes(2 * CHUNK_BYTES + 17)
    stream = encode(HELLO) + b"".join(bulk(7, contribution(len(payload)), payload)) + encode(REPORT) + encode(BUFFERS)
    expected = [(HELLO, None), (contribution(len(payload)), payload), (REPORT, None), (BUFFERS, None)]
    assert seen(open_parser().feed(stream)) == expected


def test_learner_reads_what_the_syncer_says():
    parser = Parser(learner_dialect(lambda message: 3))
    parser.legal = frames.CONTROL_LINE | frames.BULK_LINE
    welcome = sample(Welcome, run="run", config=b"config")
    publication = sample(Publication, version=1, digest=b"d" * 32)
    stream = encode(welcome) + b"".join(bulk(1, publication, b"abc"))
    assert seen(parser.feed(stream)) == [(welcome, None), (publication, b"abc")]
    with pytest.raises(ProtocolError):
        parser.feed(encode(HELLO))


def test_an_empty_payload_is_complete_with_its_announcement():
    assert seen(open_parser().feed(bulk(1, contribution(0), b"")[0])) == [(contribution(0), b"")]


SPLIT_PAYLOAD = bytes(range(256)) * 3
SPLIT_STREAM = b"".join(
    [
        encode(HELLO),
        frames.PING_FRAME,
        *bulk(1, contribution(768), SPLIT_PAYLOAD),
        *bulk(2, contribution(0), b""),
        encode(REPORT),
        frames.PING_FRAME,
    ]
)


@given(st.lists(st.integers(0, len(SPLIT_STREAM)), max_size=40))
def test_any_split_of_the_stream_gives_the_same_messages(cuts):
    parser, items = open_parser(), []
    for start, end in itertools.pairwise([0, *sorted(cuts), len(SPLIT_STREAM)]):
        items += parser.feed(SPLIT_STREAM[start:end])
    expected = [(HELLO, None), (contribution(768), SPLIT_PAYLOAD), (contribution(0), b""), (REPORT, None)]
    assert seen(items) == expected


@given(st.lists(st.integers(0, 3 * CHUNK_BYTES), max_size=10))
def test_what_must_still_come_is_never_more_than_comes(cuts):
    payload = bytes(2 * CHUNK_BYTES + 17)
    stream = b"".join(bulk(1, contribution(len(payload)), payload))
    parser = open_parser()
    for start, end in itertools.pairwise([0, *sorted(min(cut, len(stream) - 1) for cut in cuts)]):
        parser.feed(memoryview(stream)[start:end])
        rest = len(stream) - end
        assert parser.is_idle or 0 < parser.to_come <= rest
        if parser.transfers.is_open:
            assert parser.to_come > rest - 3 * (frames.HEADER_BYTES + frames.PREFIX.size)


def test_one_byte_at_a_time_gives_the_same_messages():
    parser = open_parser()
    items = [item for byte in SPLIT_STREAM for item in parser.feed(bytes([byte]))]
    assert len(items) == 4


def test_a_chunk_is_received_straight_into_its_payload():
    parser = open_parser()
    announcement, chunk = bulk(1, contribution(1000), b"x" * 1000)
    parser.feed(announcement + chunk[:-1000])
    place = parser.buffer()
    assert len(place) == 1000
    place[:] = b"x" * 1000
    item = parser.received(1000)
    place[0] = ord("y")
    assert bytes(item.payload[:2]) == b"yx"


def test_a_message_is_delivered_though_junk_comes_with_it():
    items = open_parser().items(encode(HELLO) + b"junk")
    assert next(items) == frames.Delivery(HELLO, None)
    with pytest.raises(ProtocolError, match="not a Skerry frame"):
        next(items)


def test_what_is_legal_may_change_between_two_items_that_came_together():
    """Behind the last word of a handshake its sender may have sent messages already."""
    parser = open_parser()
    parser.legal = frames.STRANGER
    items = parser.items(encode(Proof(1, bytes(32), b"")) + encode(HELLO))
    assert isinstance(next(items), Proof)
    parser.legal = frames.CONTROL_LINE
    assert next(items) == frames.Delivery(HELLO, None)


def test_chunks_come_in_any_order():
    payloads = {seq: random.Random(seq).randbytes(3 * CHUNK_BYTES + seq) for seq in (1, 2, 3)}
    stream = b""
    for seq, payload in payloads.items():
        announcement, *chunks = bulk(seq, contribution(len(payload), seq), payload)
        random.Random(seq).shuffle(chunks)
        stream += announcement + b"".join(chunks)
    got = {item.message.seq: bytes(item.payload) for item in open_parser().feed(stream)}
    assert got == payloads


# ------------------------------------------------------------------------------------------------------ what is illegal


@pytest.mark.parametrize("bit", range(8))
@pytest.mark.parametrize("kind", ["message", "bulk", "chunk", "ping"])
def test_every_flipped_bit_of_a_frame_is_noticed(kind, bit):
    announcement, chunk = bulk(1, contribution(40), b"z" * 40)
    before, frame = {
        "message": (b"", encode(HELLO)),
        "bulk": (b"", announcement),
        "chunk": (announcement, chunk),
        "ping": (b"", frames.PING_FRAME),
    }[kind]
    for index in range(len(frame)):
        parser = open_parser()
        parser.feed(before)
        broken = bytearray(frame)
        broken[index] ^= 1 << bit
        with pytest.raises(ProtocolError):
            parser.feed(broken)


def test_a_truncated_stream_gives_no_message():
    frame = b"".join(bulk(1, contribution(40), b"z" * 40))
    for end in range(len(frame)):
        assert open_parser().feed(frame[:end]) == []


JUNK = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": bytes.fromhex("16030100c8010000c40303") + bytes(60),
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n",
    "redis": b"PING\r\n",
    "zeros": bytes(100),
    "newline": b"\n",
    "garbage before the magic": b"x" + encode(HELLO),
    "10 GB cannot even be said; 4 GB": raw(frames.MESSAGE, b"", length=2**32 - 1),
    "message over the limit": raw(frames.MESSAGE, b"", length=frames.MESSAGE_BYTES_MAX + 1),
    "chunk over the limit": raw(frames.CHUNK, b"", length=frames.CHUNK_BYTES + 17),
    "chunk without bytes": raw(frames.CHUNK, bytes(16)),
    "empty message": raw(frames.MESSAGE, b""),
    "ping with a body": raw(frames.PING, b"x"),
    "unknown kind": raw(200, b"x"),
    "kind 0": raw(0, b"x"),
    "another frame version": raw(frames.MESSAGE, b"x", version=2),
    "reserved bits": raw(frames.MESSAGE, b"x", reserved=1),
    "wrong checksum": raw(frames.MESSAGE, b"x", checksum=1),
    "handshake after the handshake": encode(Challenge(1, bytes(32), True)),
    "chunk of nothing": raw(frames.CHUNK, bytes(16) + b"x"),
    "not msgpack": raw(frames.MESSAGE, b"\xc1\xc1"),
    "not a map": raw(frames.MESSAGE, msgspec.msgpack.encode([1, 2, 3])),
    "unknown message": raw(frames.MESSAGE, msgspec.msgpack.encode({"type": "Evil"})),
    "a message of the other side": encode(sample(Done)),
    "missing field": raw(frames.MESSAGE, msgspec.msgpack.encode({"type": "Hello", "protocol": 1})),
    "bad utf-8": raw(frames.MESSAGE, b"\x81\xa4type\xa2\xff\xfe"),
    "trailing bytes": raw(frames.MESSAGE, msgspec.msgpack.encode(HELLO) + b"\0"),
    "array of 2^32": raw(frames.MESSAGE, b"\x82\xa4type\xa6Report\xa9positions\xdd\xff\xff\xff\xff"),
    "depth 50,000": raw(frames.MESSAGE, b"\x82\xa4type\xa5Hello\xa1x" + b"\x91" * 50_000),
    "pickle": raw(frames.MESSAGE, b"cos\nsystem\n(S'true'\ntR."),
    "contribution without payload": raw(frames.MESSAGE, msgspec.msgpack.encode(contribution(0))),
    "report with payload": raw(frames.BULK, msgspec.msgpack.encode((1, 5, REPORT))),
    "work done before the first step": raw(
        frames.MESSAGE, msgspec.msgpack.encode(msgspec.structs.replace(REPORT, alone=Stretch(-5)))
    ),
    "announcement that is none": raw(frames.BULK, msgspec.msgpack.encode((1, contribution(0)))),
    "payload too long": raw(frames.BULK, msgspec.msgpack.encode((1, 6, contribution(5)))),
    "payload too short": raw(frames.BULK, msgspec.msgpack.encode((1, 4, contribution(5)))),
    "payload of 2^63": raw(frames.BULK, msgspec.msgpack.encode((1, 2**63, contribution(5)))),
    "payload of -1": raw(frames.BULK, msgspec.msgpack.encode((1, -1, contribution(5)))),
}


@pytest.mark.parametrize("name", JUNK)
def test_junk_is_a_protocol_error_of_one_line_that_costs_no_memory(name):
    parser = open_parser()
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError) as caught:
            parser.feed(JUNK[name])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert str(caught.value).isprintable() and len(str(caught.value)) <= errors.LINE_CHARS_MAX


@given(st.binary(min_size=1, max_size=200), st.sampled_from([frames.MESSAGE, frames.BULK]))
def test_random_bodies_are_protocol_errors(body, kind):
    with pytest.raises(ProtocolError):
        open_parser().feed(raw(kind, body))


def test_what_a_peer_says_cannot_break_a_log_line():
    with pytest.raises(ProtocolError) as caught:
        open_parser().feed(raw(frames.MESSAGE, msgspec.msgpack.encode({"type": "\n\x1b[31m\u202e" * 1000})))
    assert str(caught.value).isprintable()


def test_a_stranger_may_only_shake_hands():
    for frame in (encode(HELLO), frames.PING_FRAME, bulk(1, contribution(0), b"")[0]):
        with pytest.raises(ProtocolError):
            Parser(syncer_dialect(limit)).feed(frame)
    with pytest.raises(ProtocolError):
        Parser(syncer_dialect(limit)).feed(raw(frames.HANDSHAKE, b"", length=(64 << 10) + 1))
    proof, attach = Proof(1, bytes(32), b""), Attach(1, bytes(32), bytes(16), b"")
    assert Parser(syncer_dialect(limit)).feed(encode(proof) + encode(attach)) == [proof, attach]
    with pytest.raises(ProtocolError):  # a peer does not choose the decoder: this one is for learners
        Parser(syncer_dialect(limit)).feed(encode(Challenge(1, bytes(32), True)))


def test_the_owner_may_refuse_a_payload():
    def refuse(message):
        raise ProtocolError("fragment 0 is not due")

    with pytest.raises(ProtocolError, match="not due"):
        open_parser(refuse).feed(bulk(1, contribution(5), b"hello")[0])


@pytest.mark.parametrize(
    ("offset", "length"),
    [
        (1, 10),
        (CHUNK_BYTES, 10),
        (2 * CHUNK_BYTES, 10),
        (2**63, 10),
        (2**64 - 1, 1),
        (0, 10),
        (CHUNK_BYTES, 12),
    ],
)
def test_a_chunk_outside_its_place_is_refused(offset, length):
    parser = open_parser()
    parser.feed(bulk(1, contribution(CHUNK_BYTES + 11), bytes(CHUNK_BYTES + 11))[0])
    with pytest.raises(ProtocolError):
        parser.feed(raw(frames.CHUNK, struct.pack("<QQ", 1, offset) + bytes(length)))


def test_a_chunk_comes_once():
    pieces = bulk(1, contribution(CHUNK_BYTES + 1), bytes(CHUNK_BYTES + 1))
    with pytest.raises(ProtocolError, match="twice"):
        open_parser().feed(pieces[0] + pieces[1] + pieces[1])
    with pytest.raises(ProtocolError, match="twice"):
        open_parser().feed(pieces[0] + pieces[0])


def test_transfers_in_progress_are_bounded():
    parser = open_parser()
    for transfer in range(frames.TRANSFERS_MAX):
        parser.feed(bulk(transfer, contribution(1), b"x")[0])
    with pytest.raises(ProtocolError, match="transfer announced while"):
        parser.feed(bulk(99, contribution(1), b"x")[0])


ORDERS = [
    PauseRun(),
    FinishRun(),
    SetKeys({"sync.quorum": 3, "sync.grace": 0.5, "merge.rule": "mean", "sync.cut_tensors": True}),
    ExtendRun(tokens=2 * 10**9),
    DropLearner("fern"),
    ReadmitLearner("fern"),
]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_an_order_round_trips(order):
    assert frames.decode_order(frames.encode_order(order)) == order


@pytest.mark.parametrize(
    "order",
    [
        SetKeys({}),
        SetKeys({f"sync.k{n}": n for n in range(33)}),
        SetKeys({"x" * 65: 1}),
        SetKeys({"sync.quorum": 1 << 60}),
        SetKeys({"sync.quorum": "\x1b[2J"}),
        ExtendRun(tokens=-1),
        ExtendRun(steps=1 << 60),
        ExtendRun(minutes=-1.0),
        DropLearner("x" * 257),
        Done(1, 1),
    ],
    ids=str,
)
def test_an_order_out_of_bounds_is_not_decoded(order):
    with pytest.raises(ProtocolError):
        frames.decode_order(frames.encode_order(order))
    with pytest.raises(ProtocolError):
        frames.decode_order(b"\xc1 no msgpack")
