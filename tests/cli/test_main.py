"""The command line as a caller in the same process sees it."""

import logging

from cli.called import called


def test_a_command_leaves_logging_as_it_found_it(capsys, tmp_path):
    """Its handler writes to the stderr it had, which its caller may close before the next line is logged."""
    handlers, level = logging.root.handlers[:], logging.root.level
    code, _, err = called(capsys, "syncer", "--run", tmp_path / "run", "--port", 0, "--run.steps", 0)
    assert code == 2 and "budget" in err
    assert (logging.root.handlers, logging.root.level) == (handlers, level)
