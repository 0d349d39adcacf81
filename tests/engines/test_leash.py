"""What holds somebody else's command: its signals, its exit code, and all that it starts."""

import os
import signal
import subprocess
import sys

import pytest

from e2e.processes import is_running, until
from engines.launches import below
from skerry.engines import leash


def held(*words, parent=None, grace_s=20, **options):
    command = [sys.executable, "-I", "-S", leash.__file__, str(parent or os.getpid()), str(grace_s), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)


def shell(script, **options):
    return held("sh", "-c", script, **options)


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill $$", 143)])
def test_it_ends_as_its_command_does(script, code):
    assert shell(script).wait(60) == code


def test_a_command_that_is_not_there_is_said_to_be(capfd):
    assert held("/nowhere/train").wait(60) == 127
    assert "skerry: /nowhere/train: cannot be started (No such file or directory): check" in capfd.readouterr().err


def test_a_signal_reaches_all_of_the_command():
    """A shell does not pass it on: what it waits for hears of it by the group."""
    with shell(
        "trap 'echo shell' TERM; (trap 'echo child; exit' TERM; echo up; while :; do sleep 0.1; done); echo on"
    ) as it:
        assert it.stdout.readline() == "up\n"
        it.terminate()
        assert sorted(it.stdout.read().split()) == ["child", "on", "shell"] and it.wait(60) == 0


def test_who_does_not_end_when_told_is_killed_after_the_grace():
    with shell("trap '' TERM; echo up; while :; do sleep 0.1; done", grace_s=0.5) as it:
        it.stdout.readline()
        it.terminate()
        assert it.wait(60) == 137


def test_nothing_that_a_command_started_outlives_it():
    """Not what began a session of its own either, as torchrun's workers do."""
    with shell(
        "setsid sh -c 'echo $$; exec sleep 600' & sleep 600 & echo $!; read -r _ < /dev/null; exec sleep 0.5"
    ) as it:
        started = [int(it.stdout.readline()) for _ in range(2)]
        assert it.wait(60) == 0
        assert not any(map(is_running, started))


def test_what_a_command_left_and_has_ended_is_cleared_away_while_it_runs():
    """Each would keep a number of the system's until the command ends."""
    with shell("for i in 1 2 3 4 5; do (setsid true &); done; echo up; read -r _; exit 4", stdin=subprocess.PIPE) as it:
        assert it.stdout.readline() == "up\n"
        until(lambda: len(below(it.pid)) == 1, "only the command to be left")
        it.stdin.close()
        assert it.wait(60) == 4


def test_the_end_of_the_supervisor_is_the_end_of_the_command():
    script = (
        "import subprocess, sys, os\n"
        f"subprocess.Popen([sys.executable, '-I', '-S', {leash.__file__!r}, str(os.getpid()), '5', 'sh', '-c', "
        "'setsid sleep 600 & sleep 600']).wait()"
    )
    with subprocess.Popen([sys.executable, "-c", script]) as supervisor:
        started = until(lambda: len(found := below(supervisor.pid)) >= 4 and found, "leash, shell and two that sleep")
        supervisor.send_signal(signal.SIGKILL)
    until(lambda: not any(map(is_running, started)), "the end of all of it")


def test_a_leash_that_is_killed_takes_its_command_along():
    with held("sleep", "600") as it:
        [command] = until(lambda: below(it.pid), "the command")
        it.kill()
    until(lambda: not is_running(command), "its end")
