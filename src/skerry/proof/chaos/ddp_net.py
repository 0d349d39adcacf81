"""A small network of namespaces on one machine, whose links can be made slow: one namespace a rank, joined by a bridge.

Needs no root where the kernel allows user namespaces. Nothing of it has a name on the machine: each namespace lives as
long as a process in it, and the processes that hold them end when this one does, whichever way.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from types import TracebackType

from skerry.errors import NetworkError

RATE = "2mbit"
SHAPE = f"tbf rate {RATE} burst 16kbit latency 400ms"
DELAY_MS = 25  # one way
DELAY = f"netem delay {DELAY_MS}ms limit 100"
WAYS: tuple[list[str], ...] = (["--user", "--map-root-user"], [])  # as anybody; as root, without user namespaces
SBIN = "/usr/sbin:/sbin"  # ip and tc lie here, and not everybody's PATH has it
TOOL_S = 20.0
INTERFACE = "eth0"  # of each rank, in its namespace


def why_not() -> str | None:
    """The reason why a slow network cannot be made on this machine, or None where it can: tried, not guessed."""
    try:
        with Network(2):
            return None
    except NetworkError as error:
        return str(error)


class Network:
    """`ranks` namespaces on a bridge; `inside` starts a command in one of them, `slow_down` limits every link."""

    def __init__(self, ranks: int) -> None:
        assert 1 <= ranks <= 250, f"{ranks} ranks in a /24"
        self.ranks = ranks
        self.has_delay = False
        self._tools: dict[str, str] = {}
        self._way: list[str] = []
        self._bridge = 0  # the process that holds the namespace with the bridge
        self._hosts: list[int] = []  # the processes that hold the ranks' namespaces
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Network:
        self._tools = {name: _tool(name) for name in ("ip", "tc", "unshare", "nsenter")}
        reasons = []
        for self._way in WAYS:
            try:
                with self._stack:
                    self._make()
                    self._stack = self._stack.pop_all()
                return self
            except NetworkError as error:
                reasons.append(str(error))
        raise NetworkError(reasons[0])

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def inside(self, rank: int) -> list[str]:
        """Words to put before a command; the process keeps its id and its parent."""
        return self._into(self._hosts[rank])

    def slow_down(self) -> None:
        """Limit both ends of every link; delay what ranks send, where the kernel can."""
        for rank, host in enumerate(self._hosts):
            self._tc(self._bridge, f"add dev link{rank} root {SHAPE}")
            self._tc(host, f"add dev {INTERFACE} root handle 1: {SHAPE}")
            if self.has_delay:
                self._tc(host, f"add dev {INTERFACE} parent 1:1 {DELAY}")

    # ------------------------------------------------------------------------------------------ making it

    def _make(self) -> None:
        self._bridge = self._hold([self._tools["unshare"], *self._way, "--net"])
        another = [*self._into(self._bridge), self._tools["unshare"], "--net"]
        self._hosts = [self._hold(another) for _ in range(self.ranks)]
        self._wire()
        self._try_out()

    def _hold(self, unshare: list[str]) -> int:
        """Start a process in a namespace of its own; it ends when its standard input does, that is, with this one."""
        process = subprocess.Popen(
            [*unshare, "sh", "-c", "echo; exec cat"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self._stack.callback(_end, process)
        assert process.stdout is not None and process.stderr is not None
        if not process.stdout.readline():
            raise NetworkError(
                f"network namespaces are not allowed ({_first_line(process.stderr.read())}): run it where they are"
            )
        return process.pid

    def _into(self, holder: int) -> list[str]:
        user = ["--user", "--preserve-credentials"] if self._way else []
        return [self._tools["nsenter"], "--target", str(holder), *user, "--net"]

    def _wire(self) -> None:
        self._ip(self._bridge, "link add name bridge0 type bridge", "link set bridge0 up")
        for rank, host in enumerate(self._hosts):
            pair = f"link add name link{rank} type veth peer name {INTERFACE} netns {host}"
            self._ip(self._bridge, pair, f"link set link{rank} master bridge0 up")
            address = f"address add 10.77.0.{rank + 1}/24 dev {INTERFACE}"
            self._ip(host, address, f"link set {INTERFACE} up", "link set lo up")

    def _try_out(self) -> None:
        """Find out now, not at the moment of the fault, what this kernel can do to a link."""
        self._tc(self._bridge, f"add dev link0 root {SHAPE}")
        self._tc(self._bridge, "delete dev link0 root")
        with contextlib.suppress(NetworkError):
            self._tc(self._bridge, f"add dev link0 root {DELAY}")
            self._tc(self._bridge, "delete dev link0 root")
            self.has_delay = True

    def _ip(self, holder: int, *commands: str) -> None:
        self._do(holder, "ip", "-batch -", "\n".join(commands))

    def _tc(self, holder: int, command: str) -> None:
        self._do(holder, "tc", f"qdisc {command}")

    def _do(self, holder: int, tool: str, words: str, text: str = "") -> None:
        command = [*self._into(holder), self._tools[tool], *words.split()]
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=TOOL_S)
        if done.returncode:
            raise NetworkError(f"{tool} cannot set up a link ({_first_line(done.stderr)}): run it where it can")


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def _tool(name: str) -> str:
    path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SBIN}")
    if path is None:
        package = "iproute2" if name in ("ip", "tc") else "util-linux"
        raise NetworkError(f"there is no {name!r} on this machine; install {package}")
    return path


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "it said nothing")
