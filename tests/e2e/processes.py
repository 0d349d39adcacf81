"""Real processes for tests: commands, a live syncer, and a puppet that speaks the learner's side by hand.

Every wait is on a condition and limited; nothing here sleeps in the hope that something has happened.
"""

import json
import os
import queue
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import xxhash
from safetensors.numpy import save_file

from skerry.algo import codecs
from skerry.algo.fragments import Tensor, layout_of, split
from skerry.core.messages import (
    FULL,
    PROTOCOL,
    Contribution,
    Done,
    FragmentPosition,
    Hello,
    Publication,
    Pull,
    Refused,
    Rejected,
    Report,
    Welcome,
)
from skerry.core.state import decode_fact
from skerry.shell.identity import tls_of
from skerry.store import Store
from skerry.wire.client import Client
from skerry.wire.transport import Inbox, Lost, Opened, Received

WAIT_S = 90.0
POLL_S = 0.02
STEP_TOKENS = 10

SHAPES = {"emb.weight": (32, 8), "mlp.bias": (16,), "mlp.weight": (16, 8)}
FRAGMENTS = 2
OPTIONS = [
    "--run.steps=1000000", "--run.learners=2", "--sync.quorum=1", f"--sync.num_fragments={FRAGMENTS}",
    "--sync.policy=fixed", "--sync.sync_every=2", "--sync.fragment_sync_delay=1", "--wire.codec_up=fp32",
]  # fmt: skip


def command(*words):
    return [sys.executable, "-m", "skerry", *map(str, words)]


def skerry(*words, timeout=WAIT_S, **options):
    """Run a command to its end."""
    return subprocess.run(command(*words), capture_output=True, text=True, timeout=timeout, **options)


def secret(path, text):
    """A file for its owner alone."""
    path.write_text(text)
    path.chmod(0o600)
    return path


def until(condition, what):
    """Wait for a condition and return its (true) value."""
    deadline = time.monotonic() + WAIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {WAIT_S:.0f} s for {what}"
        time.sleep(POLL_S)
    return value


def status_of(run_dir):
    """The syncer's status, or nothing while there is none."""
    try:
        return json.loads((run_dir / "status.json").read_bytes())
    except (OSError, ValueError):
        return {}


def facts_of(run_dir):
    with Store.open(run_dir, readonly=True) as store:
        return [decode_fact(record.body) for record in store.history()]


def set_pace(run_dir, learners, share):
    """Have so many learners of a local run step at this share of their pace from now on; 1 is the one they came with.

    How long a process takes to start is the machine's affair: what must not be over before it is there, goes slowly.
    """
    for name in (f"learner-{i}" for i in range(learners)):
        file = run_dir / "paces" / name
        if share == 1:
            file.unlink(missing_ok=True)
        elif not file.exists():
            file.parent.mkdir(exist_ok=True)
            file.with_suffix(".tmp").write_text(str(share))
            file.with_suffix(".tmp").replace(file)  # a learner may read at any moment


def processes_naming(text):
    """Ids of live processes with `text` in their command line, this one left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if text.encode() in words:
                found.append(int(entry.name))
    return found


def write_genesis(path, shapes=SHAPES):
    """A small model made without torch."""
    draw = np.random.default_rng(7)
    save_file({name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}, path)
    return path


def is_running(pid):
    """And is not merely waiting for somebody to ask how it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Running:
    """A command left running, its output in files."""

    command = staticmethod(command)

    def __init__(self, folder, *words):
        self.out, self.err = folder / "stdout.txt", folder / "stderr.txt"
        with self.out.open("ab") as out, self.err.open("ab") as err:
            self.process = subprocess.Popen(self.command(*words), stdin=subprocess.DEVNULL, stdout=out, stderr=err)

    @property
    def said(self):
        return self.err.read_text(errors="replace")

    @property
    def refusals(self):
        return [line for line in self.said.splitlines() if line.startswith("skerry: ") and ": serving " not in line]

    def wait(self):
        return self.process.wait(WAIT_S)

    def signal(self, number):
        self.process.send_signal(number)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Syncer(Running):
    """A live `skerry syncer`, by default of the small model, up when the constructor returns."""

    def __init__(self, folder, *words, run_dir=None, genesis=None, options=OPTIONS):
        self.run_dir = run_dir or folder / "run"
        words = ["syncer", "--run", self.run_dir, "--port", "0", *words]
        if not (self.run_dir / "tape").exists():
            words += ["--genesis", genesis or write_genesis(folder / "genesis.safetensors"), *options]
        super().__init__(folder, *words)
        until(self._is_up, "the syncer to come up")
        self.port = int(self.status["address"].rpartition(":")[2])

    @property
    def status(self):
        return status_of(self.run_dir)

    def _is_up(self):
        assert self.process.poll() is None, self.said
        return self.status.get("pid") == self.process.pid


class Puppet:
    """A learner of the small model spoken by hand: steps whenever it listens, and contributes what a test says."""

    def __init__(self, port, name="puppet", token=None, key_file=None):
        self.layout = layout_of(Tensor(n, s, "embedding" if "emb" in n else "other") for n, s in SHAPES.items())
        self.fragments = split(self.layout, FRAGMENTS)
        self.name, self.life, self.step, self.number, self.seq = name, 0, 0, 0, 0
        self.base = [FULL] * FRAGMENTS
        self.mark = [0] * FRAGMENTS
        self.outstanding = [(0, 0)] * FRAGMENTS  # (seq, to_step)
        self.inbox = Inbox()
        self.client = Client("127.0.0.1", port, token, self.inbox, self._payload_bytes, tls=tls_of(key_file))
        try:
            self.peer = self._hear(Opened).peer
            hello = Hello(PROTOCOL, name, os.urandom(8).hex(), 0, msgspec.json.encode(self.layout), self.layout.digest)
            self.client.send(self.peer, hello)
            self.life = self._hear(Welcome).life
            self._report()
            while FULL in self.base:
                self._take(self.inbox.get(timeout=WAIT_S))
        except BaseException:
            self.client.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.close()

    def pulled(self):
        """Step until the syncer pulls a fragment; its index."""
        return self._step_until(lambda message: isinstance(message, Pull)).fragment

    def contribute(self, fragment, value=1e-3):
        """Send a contribution filled with `value`, for the work since the mark."""
        payload = np.full(self.fragments[fragment].size, value, np.float32).tobytes()
        self.seq += 1
        message = Contribution(
            self.name, self.life, self.seq, fragment, self.base[fragment],
            self.mark[fragment], self.mark[fragment] * STEP_TOKENS, self.step, self.step * STEP_TOKENS,
            "fp32", xxhash.xxh3_128_digest(payload),
        )  # fmt: skip
        self.outstanding[fragment] = (self.seq, self.step)
        self.client.send(self.peer, message, payload)

    def merged(self, fragment):
        """Step until the outstanding contribution to this fragment is in a version; that version."""
        self._step_until(lambda _: not self.outstanding[fragment][0])
        return self.base[fragment]

    def rejected(self):
        return self._step_until(lambda message: isinstance(message, Rejected))

    def merge_once(self):
        fragment = self.pulled()
        self.contribute(fragment)
        return self.merged(fragment)

    def _step_until(self, condition):
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            try:
                message = self._take(self.inbox.get(timeout=POLL_S))
            except queue.Empty:
                self.step += 1
                self._report()
                continue
            if condition(message):
                return message
        raise AssertionError(f"waited {WAIT_S:.0f} s; at {self.step} steps, bases {self.base}")

    def _report(self):
        self.number += 1
        positions = tuple(
            FragmentPosition(base, mark, mark * STEP_TOKENS, outstanding[0])
            for base, mark, outstanding in zip(self.base, self.mark, self.outstanding, strict=True)
        )
        tokens = self.step * STEP_TOKENS
        self.client.send(
            self.peer, Report(self.name, self.life, self.number, self.step, tokens, POLL_S, "training", positions)
        )

    def _take(self, event):
        assert not isinstance(event, Lost), event.reason
        message = event.message if isinstance(event, Received) else None
        assert not isinstance(message, Refused | Done), message
        if isinstance(message, Publication):
            p = message.fragment
            self.base[p] = message.version
            seq, to_step = self.outstanding[p]
            if seq and message.settled_seq >= seq:
                self.mark[p], self.outstanding[p] = to_step, (0, 0)
            self._report()
        elif isinstance(message, Rejected):
            self.mark[message.fragment], self.outstanding[message.fragment] = self.step, (0, 0)
            self._report()
        return message

    def _hear(self, kind):
        while True:
            event = self.inbox.get(timeout=WAIT_S)
            heard = event.message if isinstance(event, Received) else event
            assert not isinstance(heard, Refused), heard.text
            if isinstance(heard, kind):
                return heard

    def _payload_bytes(self, message):
        return codecs.payload_bytes(message.codec, self.fragments[message.fragment].size)


def stranger(port):
    return socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)


def is_hung_up(sock):
    """Read until the other side closes the connection."""
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True
