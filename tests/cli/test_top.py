"""skerry top and skerry status --watch: pages that fit, rates, and real processes in a real terminal over a restart."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time

import msgspec
import pytest
from rich.console import Console

from cli.called import called
from e2e.processes import WAIT_S, Puppet, Running, Syncer, command, until
from skerry.cli.top import ORDERS, View, by_attention, ordered
from skerry.cli.watching import Look, Rates
from skerry.node.record import legible

ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[()][A-Z0-9]|[=>])")


def learner(state="training", **about):
    plain = {"life": 1, "step": 5, "tokens_per_s": 100.0, "step_s": 0.1, "unmerged_steps": 2, "loss": 2.5}
    return plain | {"state": state, "heard_s": 0.1, "bytes_up": 10, "bytes_down": 10, **about}


def record(learners, **about):
    tokens = {"produced": 30.0, "merged": 20.0, "pending": 7.0, "discarded": {"died": 3.0}}
    return {
        "run": "run", "at": 100.0, "age_s": 0.1, "phase": "steady", "progress": 0.25, "elapsed_s": 60.0,
        "budget": {"tokens": 80.0}, "merges": 12, "contributors_mean": 2.0, "rounds_open": 1, "waiting": "for steps",
        "sync_every": 8, "sync_every_reached": 8.5, "quorum": 1, "ready": 3, "versions": [4, 4, 4], "tokens": tokens,
        "bytes_in": 1000, "bytes_out": 2000, "learners": learners, "serving": "served", "pid": 7, "address": "a:1",
        **about,
    }  # fmt: skip


def lines_of(view, width, height):
    console = Console(width=width, height=height, force_terminal=False)
    with console.capture() as shown:
        console.print(view.page(width, height))
    return [line.rstrip() for line in shown.get().splitlines()]


# ---------------------------------------------------------------------------------------------- pages


def test_bytes_are_those_since_this_syncer_began_as_in_a_status():
    said = "\n".join(lines_of(View("runs/mine", Look(record({}))), 120, 24))
    assert "2 kB since this syncer began" in said and "in all" not in said


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 50), (200, 24), (60, 12)])
@pytest.mark.parametrize("count", [0, 1, 256])
def test_a_page_is_as_large_as_the_window(width, height, count):
    learners = {f"island-with-a-long-name-{n:03d}": learner() for n in range(count)}
    said = lines_of(View("runs/mine", Look(record(learners, behind="x" * 300))), width, height)
    assert len(said) == height and max(map(len, said)) <= width
    assert said[0].startswith("run  steady, 25.0 %, 12 merges, waiting for steps")
    assert ("about 3 min left" in said[1]) == (count > 0 and width > 60), "while nobody trains nobody knows"
    assert "H 8 asked, 8.5 reached" in said[3] and "20 merged" in said[4] and "7 pending" in said[4]


def test_256_learners_scroll_to_the_last_and_no_further():
    view = View("runs/mine", Look(record({f"l{n:03d}": learner() for n in range(256)})), order=1)
    assert "l000" in lines_of(view, 80, 24)[8] and "1–15 of 256 learners" in lines_of(view, 80, 24)[-1]
    for key in (" ", "j"):
        assert view.obey(key, 24)
    assert "l016" in lines_of(view, 80, 24)[8]
    for _ in range(300):
        view.obey("\x1b[B", 24)
    said = lines_of(view, 80, 24)
    assert "l241" in said[8] and "l255" in said[-2] and "242–256 of 256" in said[-1]
    view.obey("g", 24)
    assert "l000" in lines_of(view, 80, 24)[8]
    assert not view.obey("q", 24)


def test_what_needs_attention_comes_first_and_every_order_can_be_turned_round():
    learners = {
        "a-left": learner("left"),
        "b-well": learner(),
        "c-behind": learner(round_steps=30.0),
        "d-stalled": learner("stalled"),
        "e-lost": learner("lost"),
        "f-unmerged": learner(unmerged_steps=9),
        "g-strange": learner("a word of a later version"),
    }
    now = record(learners)
    assert by_attention(now) == ["e-lost", "g-strange", "d-stalled", "c-behind", "f-unmerged", "b-well", "a-left"]
    assert ordered(now, ORDERS[1]) == sorted(learners)
    for order in ORDERS:
        assert sorted(ordered(now, order, is_reversed=True)) == sorted(learners)


def test_a_run_that_nobody_serves_and_one_of_a_strange_syncer_are_shown():
    paused = record({}, serving="paused")
    for key in ("quorum", "ready", "waiting", "rounds_open", "bytes_in", "bytes_out"):
        del paused[key]
    assert "not running; paused at" in lines_of(View("runs/mine", Look(paused)), 120, 24)[0]
    strange = record({"\x1b[31ma": learner("\x1b[2J", loss=float("nan"))}, progress=float("nan"), waiting="\x1b[2J")
    told = legible(msgspec.json.encode(strange))  # as whatever comes from elsewhere
    for look in (Look(told), Look(told, "no \x1b[2J answer")):
        assert "\x1b" not in "".join(lines_of(View("a:1", look), 80, 24))


def test_rates_are_of_one_process_by_its_own_clock():
    rates = Rates()
    assert rates.take(record({})) == {}
    found = rates.take(record({}, at=102.0, merges=16, bytes_in=3000))
    assert (found["merges"], found["bytes_in"], found["bytes_out"], found["tokens"]) == (2.0, 1000.0, 0.0, 0.0)
    assert rates.take(record({}, at=102.0, merges=16, bytes_in=3000)) == found, "the same record says nothing else"
    assert rates.take(record({}, at=103.0, bytes_in=5, pid=8)) == {}, "another process counts from its own beginning"
    assert rates.take(record({}, at=104.0, serving="died", pid=8)) == {}


# ---------------------------------------------------------------------------------------------- a terminal


class Terminal:
    """A command in a terminal of its own; what it has shown, without what moves the cursor."""

    def __init__(self, *words, rows=24, columns=80):
        self.fd, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.before = termios.tcgetattr(theirs)
        environment = os.environ | {"TERM": "xterm-256color"}
        for name in ("COLUMNS", "LINES"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            command(*words),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that its Ctrl-C is a signal
        )
        self.theirs, self.shown = theirs, ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.fd)
        os.close(self.theirs)

    def until(self, text):
        """Forget what was shown up to here, once it has shown this."""
        deadline = time.monotonic() + WAIT_S
        while text not in self.shown:
            assert time.monotonic() < deadline, f"waited for {text!r}, shown is {self.shown[-2000:]}"
            if select.select([self.fd], [], [], 0.1)[0]:
                self.shown += ESCAPES.sub("", os.read(self.fd, 1 << 16).decode(errors="replace"))
        self.shown = self.shown.partition(text)[2]

    def press(self, keys):
        os.write(self.fd, keys)

    def ended(self):
        """Its exit code; read on meanwhile, for who writes to a full terminal waits."""
        deadline = time.monotonic() + WAIT_S
        while self.process.poll() is None and time.monotonic() < deadline:
            if select.select([self.fd], [], [], 0.1)[0]:
                self.shown += ESCAPES.sub("", os.read(self.fd, 1 << 16).decode(errors="replace"))
        return self.process.wait(0)


def test_top_follows_a_syncer_over_its_restart_and_leaves_the_terminal_as_it_was(tmp_path):
    with (
        Syncer(tmp_path) as syncer,
        Terminal("top", syncer.run_dir) as by_directory,
        Terminal("top", f"127.0.0.1:{syncer.port}") as by_address,
    ):
        both = (by_directory, by_address)
        with Puppet(syncer.port, "island") as puppet:
            puppet.merge_once()
            for terminal in both:
                terminal.until("island")
                terminal.press(b"s")
                terminal.until("s sort: name")
        syncer.signal(signal.SIGKILL)
        syncer.wait()
        by_directory.until("its syncer died")
        by_address.until("no word: ")
        with Syncer(tmp_path, "--port", syncer.port) as again, Puppet(again.port, "later"):
            for terminal in both:
                terminal.until("later")
            by_directory.press(b"q")
            by_address.press(b"\x03")
            for terminal in both:
                assert terminal.ended() == 0
                assert termios.tcgetattr(terminal.theirs) == terminal.before
                assert "Traceback" not in terminal.shown and "interrupted" not in terminal.shown


def test_status_watch_in_a_terminal_is_drawn_in_place_and_ends_quietly(tmp_path):
    with Syncer(tmp_path) as syncer, Terminal("status", syncer.run_dir, "--watch") as terminal:
        terminal.until("progress")
        with Puppet(syncer.port, "island"):
            terminal.until("island")
        terminal.press(b"\x03")
        assert terminal.ended() == 0 and "interrupted" not in terminal.shown and "Traceback" not in terminal.shown


def test_status_watch_for_machines_is_an_object_a_line_over_a_restart(tmp_path):
    (tmp_path / "watch").mkdir()
    with Syncer(tmp_path) as syncer:
        target = f"127.0.0.1:{syncer.port}"
        with Running(tmp_path / "watch", "status", target, "--watch", "--json") as watching:

            def said():
                return [json.loads(line) for line in watching.out.read_text().splitlines() if line]

            until(lambda: len(said()) > 1, "two lines")
            assert all(each["serving"] == "served" for each in said())
            syncer.signal(signal.SIGKILL)
            syncer.wait()
            until(lambda: "error" in said()[-1], "that nothing is heard")
            assert said()[-1]["error"].startswith(target)
            with Syncer(tmp_path, "--port", syncer.port):
                until(lambda: said()[-1].get("epoch") == 2, "the next syncer")
            watching.signal(signal.SIGINT)
            assert watching.wait() == 0 and watching.said == ""


def test_status_watch_ends_with_the_run_and_says_at_once_what_is_wrong(tmp_path, capsys):
    from node.pair import Pair, config_of

    with Pair(tmp_path / "run", config_of(steps=40)) as pair:
        pair.join("a")
        pair.close()
    code, out, err = called(capsys, "status", tmp_path / "run", "--watch", "--json")
    assert (code, err) == (0, "") and json.loads(out)["serving"] == "closed"
    code, out, _ = called(capsys, "status", tmp_path / "nothing", "--watch", "--json")
    assert code == 2 and "is no run directory" in json.loads(out)["error"]


def test_top_for_machines_is_one_object_and_elsewhere_it_wants_a_terminal(tmp_path, capsys):
    with Syncer(tmp_path) as syncer, Puppet(syncer.port, "island") as puppet:
        puppet.merge_once()
        code, out, err = called(capsys, "top", syncer.run_dir, "--json")
        said = json.loads(out)
        assert (code, err) == (0, "") and said["attention"] == ["island"] and said["rates"].keys() >= {"merges"}
        code, out, err = called(capsys, "top", syncer.run_dir)
        assert code == 2 and err.startswith("skerry: top is for a terminal: use skerry status")
