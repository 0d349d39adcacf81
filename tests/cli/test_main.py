"""The command line as a caller in the same process sees it."""

import json
import logging
import signal
import subprocess
import sys

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


LITTLE = """
import resource, sys
from skerry import cli
from skerry.cli import status
from skerry.store.files import contents

def run(words):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), resource.RLIM_INFINITY))
    from pathlib import Path
    print(len(contents(Path(words[0]))))
    bytearray(64 << 20)

status.run = run
cli.main(["status", sys.argv[1], "--json"])
"""


def test_little_memory_is_enough_for_a_small_file_and_what_is_not_enough_is_said_in_one_line(tmp_path):
    (tmp_path / "small").write_bytes(b"0123456789")
    words = [sys.executable, "-c", LITTLE, str(tmp_path / "small")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith("skerry: no memory left: "), done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout.startswith('10\n{"error":"no memory left')
