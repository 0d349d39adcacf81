"""Every error that Skerry raises for somebody else to handle. Broken invariants are asserts, and crash;
what is raised and caught inside one module stays there.

*Local*: something on this machine is not as it must be (a configuration, a file, an address, a run directory).
*Remote*: the process at the other end of a connection said or did something, or nothing at all.

An error's text is one line for a person: the thing, the place and the next step. A command prints it and exits with
its `code`, 2 unless the same command may do later; a training loop may catch `skerry.SkerryError`, or
`skerry.RemoteError` for what lies on the other side.
"""

from __future__ import annotations

from skerry.core.vocabulary import Dismissal

LINE_CHARS_MAX = 300  # of what a peer had a hand in


class SkerryError(Exception):
    """Anything Skerry refuses or cannot do; the text is one line."""

    code = 2  # with which a command exits


class LocalError(SkerryError):
    """Something here must be changed before it can work."""


class RemoteError(SkerryError):
    """The other side of a connection refused, misbehaved, or could not be reached."""


# ---------------------------------------------------------------------------------------------- local


class Refusal(LocalError):
    """Bad input that only a command knows of."""


class ConfigError(LocalError):
    """A configuration nobody can run: it names the key, the value and what to do."""


class ModelError(LocalError):
    """A model, or a file of one, that nobody can start from."""


class DataError(LocalError):
    """Text that cannot be trained on."""


class StoreError(LocalError):
    """The run directory cannot be used, or could not be written."""


class DiskFull(StoreError):
    """There is no room at the moment; with some, the same command goes on."""

    code = 75  # EX_TEMPFAIL of sysexits.h


class StoreInUse(StoreError):
    """Another process writes in this directory."""


class StoreBusy(StoreInUse):
    """It does so for a moment: the same command may do later."""

    code = 75  # EX_TEMPFAIL of sysexits.h


class TapeDamaged(StoreError):
    """Bytes that had been made durable are not what was written."""


class TapeUnknown(StoreError):
    """The tape was written by a version of Skerry whose format this one does not read."""


class FileDamaged(StoreError):
    """A file that a record names is missing, or is not what was put."""


class FileMissing(FileDamaged):
    """It is not there: lost, or removed because a later record has made it needless."""


class HookFailed(LocalError):
    """A function that somebody else wrote failed, or gave what cannot be used; the error is theirs."""


class ReplayError(LocalError):
    """What was asked for cannot be had from this run."""


class RunFailed(LocalError):
    """A child process refused to run, or kept crashing: its own last line, and where its log is."""


class WireError(LocalError):
    """This side cannot listen, dial or prove itself as it was asked to."""


class AddressInUse(WireError):
    """Another process listens there at the moment; once it does not, the same command goes on."""

    code = 69  # EX_UNAVAILABLE of sysexits.h


class KeysError(LocalError):
    """A run's keys, or somebody's key file, cannot be used as they are."""


class PlanError(LocalError):
    """A fault plan that cannot be carried out."""


class NetworkError(LocalError):
    """The network that a measurement needs cannot be made on this machine."""


class MeasurementError(LocalError):
    """A tape that no twin can be fed from."""


class StudyError(LocalError):
    """A study of the laboratory, or a file of its results, that cannot be used."""


# ---------------------------------------------------------------------------------------------- remote


class ProtocolError(RemoteError):
    """The other side broke the protocol; that peer is dropped, everything else goes on."""

    def __init__(self, reason: str) -> None:
        super().__init__(one_line(reason))


class RefusedError(RemoteError):
    """The syncer will not have this learner; the text is its own one line, `why` the word for it."""

    def __init__(self, text: str, why: Dismissal) -> None:
        super().__init__(one_line(text))
        self.why = why

    def __reduce__(self) -> tuple[type[RefusedError], tuple[str, Dismissal]]:
        return type(self), (str(self), self.why)  # a worker's error reaches its parent process


class IslandError(RemoteError):
    """A rank of the learner's own island is gone or has failed: the island ends, and the run goes on."""


class JoinTimeout(RemoteError):
    """No syncer took this learner in; it says which was dialled, for how long, and what went wrong last."""


class NoAnswer(RemoteError):
    """A syncer did not say what it was asked for: its address, and why."""


class Unanswered(NoAnswer):
    """Of an order nobody knows whether it was carried out; whoever gives it again does."""

    code = 75  # EX_TEMPFAIL of sysexits.h


def one_line(text: str) -> str:
    """Text that a peer had a hand in, fit for a log: one line, printable, of bounded length."""
    return printable(text[:LINE_CHARS_MAX])[:LINE_CHARS_MAX]


def printable(text: str) -> str:
    """Nothing in it is for the terminal: no escape codes, no ends of lines, nothing that writes backwards."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
