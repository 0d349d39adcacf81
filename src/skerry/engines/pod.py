"""The syncer's first process in a Kubernetes pod: it starts the syncer, and stays when that has ended with 0.

    python -P -m skerry.engines.pod ENDED COMMAND…

A StatefulSet starts again whatever ends, also the syncer of a run that is closed; and what is on its volume can be
reached only through a pod. So this one stays, writes the file ENDED by which the pod's probes know of it, and ends when
it is told to. A syncer that failed is no affair of its: it ends with the same code, and Kubernetes starts both again.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from skerry.store.files import put_in_place

ENDING = (signal.SIGTERM, signal.SIGINT)


def main(words: Sequence[str]) -> int:
    ended, command = Path(words[0]), list(words[1:])
    ended.unlink(missing_ok=True)  # of the life before, in the same pod
    is_told = False

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal is_told
        is_told = True
        child.send_signal(number)

    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # until there is somebody to pass it on to
    child = subprocess.Popen(command, preexec_fn=_heed)
    for each in ENDING:
        signal.signal(each, pass_on)
    _heed()
    code = child.wait()
    if code or is_told:
        return 128 - code if code < 0 else code
    put_in_place(ended, b"")
    print("the syncer has ended; what it wrote stays in reach until this pod is deleted", file=sys.stderr, flush=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    if not is_told:
        signal.sigwait(ENDING)
    return 0


def _heed() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
