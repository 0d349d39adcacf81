"""When a process should end: real processes, real signals, and a parent that dies.

The processes sleep in place of work; no test waits for the end of a sleep, only for a line, an exit or a closed pipe.
"""

import signal
import subprocess
import sys
import threading

import pytest

from skerry.shell.signals import end_with

WAIT_S = 60.0

# A process that goes on while it is wanted; it says where it is, a line at a time.
WORKER = """
import sys, time
from skerry.shell.signals import until_signalled
is_wanted = until_signalled(int(sys.argv[1]))
if "look" in sys.argv:
    is_wanted()
print("up", flush=True)
while "look" in sys.argv and is_wanted():
    time.sleep(0.01)
print("told", flush=True)
time.sleep(600 if "stay" in sys.argv or "look" not in sys.argv else 0)
"""
# A process in native code that calls back into Python, as a compiler does, and is told to end meanwhile.
COMPILER = """
import ctypes, signal, sys
from skerry.shell.signals import held_back, until_signalled
is_wanted = until_signalled(0)
def compare(one, other):
    if not came:
        came.append(signal.raise_signal(signal.SIGTERM))
    return one[0] - other[0]
came = []
numbers = (ctypes.c_int * 2)(2, 1)
kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int))
try:
    with held_back():
        ctypes.CDLL(None).qsort(numbers, 2, ctypes.sizeof(ctypes.c_int), kind(compare))
        print("compiled", list(numbers), flush=True)
    print("went on", flush=True)
except KeyboardInterrupt:
    print("told", flush=True)
"""
TWICE = """
import signal, sys
from skerry.shell.signals import held_back
with held_back():
    signal.raise_signal(signal.SIGINT)
    print("noted", flush=True)
    signal.raise_signal(int(sys.argv[1]))
"""
# A process that is told to end, does, and is told again when Python has put its handlers away.
LATE = """
import signal
from skerry.shell.signals import until_signalled
class Late:
    def __del__(self, tell=signal.raise_signal, number=signal.SIGTERM):
        tell(number)
late = Late()
is_wanted = until_signalled(0)
is_wanted()
signal.raise_signal(signal.SIGTERM)
print("told", is_wanted(), flush=True)
"""
# A process that waits for something else and would not look.
WAITER = """
import os, sys, time
from skerry.shell.signals import end_with
end_with(int(sys.argv[1]))
print("up", flush=True)
time.sleep(600)
"""
# A parent that starts one of them with its own process id, and does nothing more.
PARENT = "import os, subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1], str(os.getpid()), 'look'])"


@pytest.fixture
def started():
    """`started(code, words)` is a process whose lines can be read; none is left behind."""
    processes = []

    def start(code, *words):
        process = subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait(WAIT_S)
        process.stdout.close()


def line(process):
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_word_and_the_process_ends_in_order(started, number):
    process = started(WORKER, "0", "look")
    assert line(process) == "up"
    process.send_signal(number)
    assert line(process) == "told" and process.wait(WAIT_S) == 0


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [("SIGINT", "SIGINT", 130), ("SIGTERM", "SIGINT", 130), ("SIGINT", "SIGTERM", 143), ("SIGTERM", "SIGTERM", 143)],
)
def test_a_second_signal_ends_it_at_once_as_that_signal_would(started, first, second, code):
    later = "import skerry.shell.signals as signals; signals.ECHO_S = 0.0\n"
    process = started(later + WORKER, "0", "look", "stay")
    assert line(process) == "up"
    process.send_signal(signal.Signals[first])
    assert line(process) == "told"
    process.send_signal(signal.Signals[second])
    assert process.wait(WAIT_S) == code


def test_a_sigterm_that_follows_another_at_once_is_the_same_word(started):
    """`timeout` tells its child and then the child's group, a scheduler all processes of a job."""
    twice = "\nsignal.raise_signal(signal.SIGTERM)\n"
    process = started("import signal" + WORKER.replace('print("told"', twice + 'print("told"'), "0", "look")
    assert line(process) == "up"
    process.terminate()
    assert line(process) == "told" and process.wait(WAIT_S) == 0


def test_a_process_that_is_ending_is_not_ended_by_a_late_sigterm(started):
    process = started(LATE)
    assert line(process) == "told False" and process.wait(WAIT_S) == 0


def test_a_signal_before_the_first_look_is_an_interrupt(started):
    """Nobody would see the note: it is waiting to join."""
    process = started("import sys\ntry:\n exec(sys.argv[2])\nexcept KeyboardInterrupt:\n sys.exit(7)", "0", WORKER)
    assert (line(process), line(process)) == ("up", "told")
    process.terminate()
    assert process.wait(WAIT_S) == 7


def test_a_signal_in_native_code_is_answered_behind_it(started):
    """An exception has nowhere to go from a callback: qsort goes on with a wrong answer."""
    process = started(COMPILER)
    assert (line(process), line(process)) == ("compiled [1, 2]", "told")
    assert process.wait(WAIT_S) == 0


@pytest.mark.parametrize(("second", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_one_there_ends_the_process_at_once(started, second, code):
    process = started(TWICE, str(int(second)))
    assert line(process) == "noted" and process.wait(WAIT_S) == code


def test_a_process_is_not_wanted_once_its_parent_is_gone(started):
    parent = started(PARENT, WORKER)
    assert line(parent) == "up"
    parent.kill()
    assert line(parent) == "told"


def test_a_process_that_waits_for_something_else_is_ended_with_its_parent(started):
    parent = started(PARENT, WAITER)
    assert line(parent) == "up"
    parent.kill()
    assert parent.stdout.read() == "", "the pipe is closed by whoever held it last"


def test_without_a_parent_nobody_is_watched():
    before = threading.enumerate()
    end_with(0)
    assert threading.enumerate() == before
