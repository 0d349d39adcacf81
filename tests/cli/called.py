"""A command in this process."""

import signal

import pytest

from skerry import cli

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def called(capsys, *words):
    """(exit code, stdout, stderr); signals are handled as before, for this process has other tests."""
    before = [signal.getsignal(number) for number in SIGNALS]
    try:
        with pytest.raises(SystemExit) as end:
            cli.main([str(word) for word in words])
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)
    said = capsys.readouterr()
    return end.value.code, said.out, said.err
