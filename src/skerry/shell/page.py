"""The live page beside a run: a child process that tails the run directory, and whoever starts it again when it dies.

    with Beside(root, listening(host, port), words, log) as page: ...      page.address

The parent has the socket and the child serves it. So the port is known and taken before anything begins, it stays the
same when the child is started again, and who connects meanwhile waits a moment. Nothing of the run depends on the
child: that it dies is logged, and it is back after a pause that grows. It ends with its parent.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from skerry.errors import WireError
from skerry.python import module_argv
from skerry.store.files import appended

LOOPBACK = "127.0.0.1"
TAKEN_S = 5.0  # a page whose parent was killed has its port for a moment longer
TRY_S = 0.1
BACKLOG = 128
PAUSE_S = 1.0  # before the page is started again; doubled each time,
PAUSE_S_MAX = 60.0  # up to this,
STEADY_S = 60.0  # unless it ran for so long
TERM_S = 3.0

log = logging.getLogger("skerry.page")


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens there; refused in a line that names the options if there is none to be had."""
    try:
        family, *_, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
    except (OSError, UnicodeError):
        raise WireError(f"--http-host {host}: no such address: give one of this machine's, or leave it out") from None
    until = time.monotonic() + TAKEN_S
    while True:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(BACKLOG)
            return listener
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                said = f"--http-host {host} --http-port {port}: cannot be served ({error.strerror})"
                raise WireError(f"{said}: choose another port, or --http-port off") from None
        time.sleep(TRY_S)


def address_of(listener: socket.socket) -> str:
    """What a browser on this machine is given."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


class Beside:
    """The page of the run in `root` while this is entered; `words` are further options of `skerry dashboard`."""

    def __init__(self, root: Path, listener: socket.socket, words: Sequence[str], said: Path) -> None:
        self.address = address_of(listener)
        self._root, self._listener, self._words, self._said = root, listener, words, said
        self._process: subprocess.Popen[bytes] | None = None
        self._ending = threading.Event()
        self._tending = threading.Thread(target=self._tend, name="skerry-page", daemon=True)

    def __enter__(self) -> Beside:
        self._said.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._tending.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        for end in (subprocess.Popen.terminate, subprocess.Popen.kill):
            if (process := self._process) is not None:
                with contextlib.suppress(OSError):
                    end(process)
            self._tending.join(TERM_S)
        self._listener.close()

    def _tend(self) -> None:
        """On a thread that does nothing but wait for the child."""
        pause_s = PAUSE_S
        while not self._ending.is_set():
            began = time.monotonic()
            try:
                code = self._run()
            except OSError as error:  # no memory or no process to be had at the moment
                code = error.strerror or str(error)
            if self._ending.is_set():
                return
            pause_s = PAUSE_S if time.monotonic() - began > STEADY_S else min(2 * pause_s, PAUSE_S_MAX)
            log.warning(
                "the page ended (%s) and is back in %.0f s; the run goes on (log: %s)", code, pause_s, self._said
            )
            self._ending.wait(pause_s)

    def _run(self) -> str:
        """One life of the child; how it ended."""
        descriptor = self._listener.fileno()
        with appended(self._said) as said:
            process = subprocess.Popen(
                module_argv(
                    "skerry", "dashboard", str(self._root), *self._words,
                    "--listener", str(descriptor), "--parent", str(os.getpid()),
                ),
                stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                pass_fds=(descriptor,),
                start_new_session=True,  # Ctrl-C is for the parent
            )  # fmt: skip
        self._process = process
        if self._ending.is_set():  # it came between
            process.terminate()
        code = process.wait()
        return f"signal {-code}" if code < 0 else f"exit {code}"
