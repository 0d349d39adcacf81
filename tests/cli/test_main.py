"""The command line as a caller in the same process sees it."""

import json
import logging
import signal
import subprocess

import pytest

from cli.called import called


def test_a_command_leaves_logging_as_it_found_it(capsys, tmp_path):
    """Its handler writes to the stderr it had, which its caller may close before the next line is logged."""
    handlers, level = logging.root.handlers[:], logging.root.level
    code, _, err = called(capsys, "syncer", "--run", tmp_path / "run", "--port", 0, "--run.steps", 0)
    assert code == 2 and "budget" in err
    assert (logging.root.handlers, logging.root.level) == (handlers, level)


@pytest.fixture
def handlers():
    """A syncer answers signals in its own way, for the rest of its process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_while_the_first_values_are_made_is_said_in_one_line(capsys, tmp_path, monkeypatch, handlers):
    """The process that makes them has been started, and is waited for."""
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    words = ("syncer", "--run", tmp_path / "run", "--port", 0, "--run.steps", 5, "--json")
    code, out, err = called(capsys, *words)
    assert (code, err, json.loads(out)) == (130, "skerry: interrupted\n", {"error": "interrupted"})
    assert not (tmp_path / "run").exists()
