"""torchrun for the workers of a learner that has one machine: picks a free port at each start and becomes torchrun.

    python -P -m skerry.engines.alone WORDS…

`torchrun --standalone` would pick a port too, but its rendezvous unpickles what lies in a store that anybody who
reaches the machine can write to. So the static rendezvous is asked for, which unpickles nothing and wants a port. If
somebody takes the port between the pick and torchrun's start, torchrun ends, and is started again with another.
"""

from __future__ import annotations

import os
import socket
import sys

from skerry.engines.command import TORCHRUN, meeting
from skerry.python import module_argv

HOST = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    found = meeting(1, "0", HOST, str(free_port()))
    os.execv(sys.executable, module_argv(TORCHRUN, *found, *sys.argv[1:]))
