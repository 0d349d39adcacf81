"""`--log json`: every line of a process on stderr is one JSON object, a refusal too."""

import json
import logging
from contextlib import contextmanager

import pytest

from cli.called import called
from skerry import cli
from skerry.cli import voice


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


@contextmanager
def syncers_log():
    voice.begin(["syncer", "--log", "json"])
    with cli._logging_restored():
        voice.log_to_stderr("syncer")
        yield
    voice.begin([])


def test_a_line_says_when_who_and_what(capsys):
    with syncers_log():
        logging.getLogger("skerry.syncer").warning("%s left after %d steps, %.2f", "a", 12, 0.5)
    (line,) = lines(capsys.readouterr().err)
    assert line.pop("at") > 1.6e9
    assert line == {
        "level": "warning", "who": "syncer", "event": "a left after 12 steps, 0.50",
        "fields": {"logger": "skerry.syncer", "template": "%s left after %d steps, %.2f", "values": ["a", 12, 0.5]},
    }  # fmt: skip


def test_whatever_a_peer_had_a_hand_in_is_one_line_of_text(capsys):
    with syncers_log():
        logging.getLogger("skerry.syncer").warning("dropped %s: %s", "a\x1b[31m", float("nan"))
        voice.say("two\nlines", "error")
    first, second = lines(capsys.readouterr().err)
    assert "\x1b" not in first["event"] + str(first["fields"]) and first["fields"]["values"][1] == "nan"
    assert second["event"] == "two lines" and second["level"] == "error"


def test_an_error_has_its_traceback(capsys):
    with syncers_log():
        try:
            raise ValueError("no")
        except ValueError:
            logging.getLogger("skerry.syncer").exception("it failed")
    (line,) = lines(capsys.readouterr().err)
    assert line["event"] == "it failed" and "ValueError: no" in line["fields"]["traceback"]


@pytest.mark.parametrize("form", [["--log", "json"], ["--log=json"]])
def test_a_refusal_is_a_line_of_the_log(tmp_path, capsys, form):
    code, _, err = called(capsys, "syncer", "--run", tmp_path / "run", "--port", "99999", *form)
    (line,) = lines(err)
    assert code == 2 and line["level"] == "error" and "must be from 0 to 65535" in line["event"]


def test_without_it_lines_are_for_people(tmp_path, capsys):
    code, _, err = called(capsys, "syncer", "--run", tmp_path / "run", "--port", "99999")
    assert code == 2 and err.startswith("skerry: --port 99999")
