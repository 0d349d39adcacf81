"""A status that somebody else wrote is shown as text, and never as what moves a cursor or ends who looks at it."""

import json
import logging
import math

import pytest
from rich.console import Console

from cli.called import called
from skerry import cli
from skerry.cli import live, status, voice
from skerry.cli.top import ORDERS, View, ordered
from skerry.cli.watching import Look
from skerry.errors import LINE_CHARS_MAX, printable
from skerry.node.record import RECORD_BYTES_MAX, ROWS_MAX, legible
from skerry.page.headline import headline
from skerry.page.metrics import exposition

ESCAPE = "\x1b[31m\x1b]0;owned\x07\r\n\u202e"
LEARNER = {
    "life": 1, "state": "training", "step": 3, "tokens_per_s": 10.0, "step_s": 0.1, "loss": 2.0, "unmerged_steps": 1,
    "bytes_up": 1, "bytes_down": 1, "heard_s": 0.1,
}  # fmt: skip
RECORD = {
    "run": "r", "at": 1.7e9, "epoch": 1, "phase": "steady", "progress": 0.5, "budget": {"tokens": 9}, "over_budget": 0,
    "merges": 3, "contributors_mean": 1.0, "sync_every": 4, "versions": [1, 2], "elapsed_s": 3.0, "rounds_open": 1,
    "tokens": {"produced": 1, "merged": 1, "pending": 0, "discarded": {}}, "waiting": "for K", "quorum": 1, "ready": 1,
    "address": "127.0.0.1:1", "pid": 1, "learners": {"a": LEARNER}, "bytes_in": 1, "bytes_out": 1,
}  # fmt: skip


def shown(record):
    """What a person sees of it."""
    console = Console(width=200, force_terminal=False, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.capture() as capture:
        r = record | {"serving": "served", "age_s": 0.1}
        console.print(live.listed((name, what) for name, what in status._rows(r, "host:1")))
        console.print(live.table_of(record, 200))
    return capture.get()


def test_an_honest_record_is_as_it_was():
    assert legible(json.dumps(RECORD).encode()) == RECORD
    assert "training" in shown(legible(json.dumps(RECORD).encode()))


def test_a_long_number_of_one_learner_does_not_take_the_place_of_all_names():
    liar = LEARNER | {"loss": -1e308, "step": 2**53, "tokens_per_s": 1e300, "unmerged_steps": 2**53}
    record = legible(json.dumps(RECORD | {"learners": {"honest": LEARNER, "liar": liar}}).encode())
    for width in (80, 120):
        console = Console(width=width, force_terminal=False)
        with console.capture() as capture:
            console.print(live.table_of(record, width))
        assert "honest" in capture.get() and "liar" in capture.get() and "loss" in capture.get()


def with_text(value, text):
    """Every text and every name in it is another."""
    if isinstance(value, dict):
        return {key: with_text(each, text) for key, each in value.items()}
    return text if isinstance(value, str) else value


def test_no_escape_code_reaches_a_terminal():
    wild = with_text(RECORD, ESCAPE) | {
        "learners": {ESCAPE: with_text(LEARNER, ESCAPE)}, "behind": ESCAPE * 1000, "refused": {ESCAPE: 1},
        "ahead": {ESCAPE: ESCAPE}, "turned_away": [{"who": ESCAPE, "why": ESCAPE, "count": 1, "ago_s": 1.0}],
        "strange": [ESCAPE, {ESCAPE: ESCAPE}], "budget": {ESCAPE: 1},
        "evaluated": {"progress": 0.1, "tokens": 1, "at": 0.0, "figures": {ESCAPE: 1.0}},
    }  # fmt: skip
    seen = shown(legible(json.dumps(wild).encode()))
    assert all(c.isprintable() or c == "\n" for c in seen) and "\\x1b[31m" in seen


@pytest.mark.parametrize("number", [None, 0, 1e-320, 5e-324, 1e308, -1e308, 2**63, -(2**63), -1, 10**400, -(10**400)])
def test_no_number_ends_who_looks(number):
    def numbered(value):
        if isinstance(value, dict):
            return {key: numbered(each) for key, each in value.items()}
        return (
            [numbered(each) for each in value]
            if isinstance(value, list)
            else value
            if isinstance(value, str)
            else number
        )

    record = numbered(RECORD) | {
        "evaluated": {"progress": number, "tokens": number, "at": number, "figures": {"loss": number}},
        "disk": {"free_bytes": number, "needed_bytes": number}, "sync_every_reached": number, "behind": "",
        "turned_away": [{"who": "a", "why": "b", "count": number, "ago_s": number}],
    }  # fmt: skip
    found = legible(json.dumps(record).encode())
    assert shown(found)
    is_none = number is None or (isinstance(number, int) and abs(number) > 2**63)
    assert not is_none or math.isnan(found["merges"]), "JSON has no infinity: the writer wrote null"


FULL = RECORD | {
    "evaluated": {"progress": 0.1, "tokens": 1, "at": 1.0, "figures": {"loss": 2.0}}, "refused": {"late": 1},
    "disk": {"free_bytes": 1, "needed_bytes": 1}, "sync_every_reached": 4.0, "sync_every_configured": 4, "orders": 1,
    "turned_away": [{"who": "a", "why": "b", "count": 1, "ago_s": 1.0}], "dropped": ["c"], "ahead": {"d": "why"},
    "learners": {"a": LEARNER | {"round_steps": 1.0}},
}  # fmt: skip
GONE = object()


def spoiled_by(value, other):
    """The same in which one thing, wherever it is, is another, or gone: each in its turn."""
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        rest = [(k, v) for k, v in (value.items() if isinstance(value, dict) else enumerate(value)) if k != key]
        inner = spoiled_by(each, other) if isinstance(each, dict | list) else ()
        for put in [*([] if other is GONE else [other]), *inner]:
            yield dict([*rest, (key, put)]) if isinstance(value, dict) else [put, *(v for _, v in rest)]
        if other is GONE:
            yield dict(rest) if isinstance(value, dict) else [v for _, v in rest]


@pytest.mark.parametrize(
    "other", [GONE, None, 1e308, -1e308, 10**400, -5, "text", [], {}, True],
    ids=["gone", "null", "1e308", "-1e308", "long", "negative", "text", "list", "table", "true"],
)  # fmt: skip
def test_whatever_one_thing_in_a_status_is_it_is_shown_everywhere_or_refused(other):
    count = 0
    for record in spoiled_by(FULL, other):
        try:
            found = legible(json.dumps(record).encode())
        except ValueError:
            continue
        count += 1
        assert shown(found)
        r = found | {"serving": "served", "age_s": 0.1}
        assert View("host:1", Look(r)).page(200, 40) and [ordered(r, order) for order in ORDERS]
        assert headline(r) and exposition({"status": r, "disk_free_bytes": 1})
        cli.print_json(r)
    assert count > 2, "nothing was shown"


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[]", b"{}", b"\xff", b"[" * 10**6, b" " * (RECORD_BYTES_MAX + 1),
        json.dumps(RECORD | {"learners": []}).encode(), json.dumps(RECORD | {"merges": "many"}).encode(),
        json.dumps(RECORD | {"versions": 7}).encode(), json.dumps(RECORD | {"tokens": {"merged": []}}).encode(),
        json.dumps(RECORD | {"learners": {"a": {}}}).encode(), json.dumps(RECORD | {"evaluated": 3}).encode(),
        json.dumps(RECORD | {"x": [[[[[[[[[[1]]]]]]]]]]}).encode(),
    ],
    ids=range(13),
)  # fmt: skip
def test_what_is_no_record_is_said_to_be_none(data):
    with pytest.raises(ValueError):
        legible(data)


def test_it_is_bounded():
    many = legible(json.dumps(RECORD | {"learners": {f"l{n}": LEARNER for n in range(ROWS_MAX + 9)}}).encode())
    assert len(many["learners"]) == ROWS_MAX
    assert len(legible(json.dumps(RECORD | {"waiting": "x" * 10**6}).encode())["waiting"]) == LINE_CHARS_MAX


def test_a_hostile_syncer_that_is_asked_for_its_status_is_shown_or_refused_in_a_line(capsys):
    """Over a real connection, as `skerry status HOST:PORT` asks."""
    from skerry.wire.server import Server
    from skerry.wire.transport import Inbox

    server = Server("127.0.0.1", 0, None, Inbox(), lambda message: 0)
    try:
        target = f"127.0.0.1:{server.port}"
        for record, code in ((RECORD | {"waiting": ESCAPE}, 0), (RECORD | {"merges": ESCAPE}, 2)):
            server.show(json.dumps(record).encode())
            ended, out, err = called(capsys, "status", target)
            assert ended == code and all(c.isprintable() or c == "\n" for c in out + err), err
        assert err.count("\n") == 1 and "merges is not a number" in err
    finally:
        server.close()


def test_a_line_of_the_log_is_one_line_whatever_is_in_it(capsys):
    with cli._logging_restored():
        voice.log_to_stderr("syncer")
        logging.getLogger("skerry.syncer").warning("dropped %s: %s", "a" + ESCAPE, "why\n12:00:00 syncer: all is well")
    said = capsys.readouterr().err
    assert all(c.isprintable() or c == "\n" for c in said) and "\\x1b" in said
    assert all(line.startswith("    ") for line in said.splitlines()[1:]), "no line that looks like another's"


def test_text_without_control_characters_stays():
    assert printable("größer → ∞") == "größer → ∞"
