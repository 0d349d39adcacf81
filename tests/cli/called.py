"""A command in this process."""

import pytest

from skerry import cli


def called(capsys, *words):
    """(exit code, stdout, stderr)."""
    with pytest.raises(SystemExit) as end:
        cli.main([str(word) for word in words])
    said = capsys.readouterr()
    return end.value.code, said.out, said.err
