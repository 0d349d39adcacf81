"""The command line: a file a verb; each parses, calls and prints.

Theirs (bad input) is refused in one line on stderr with exit code 2; ours (a bug) crashes with a traceback. With
`--json` exactly one JSON object goes to stdout and nothing else does.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import inspect
import logging
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any, NoReturn, TypeVar

import msgspec

from skerry import __version__
from skerry import config as configs
from skerry.cli import voice
from skerry.errors import Refusal, SkerryError, printable
from skerry.text import Kind, near

VERBS = {
    "demo": "train on four local learners, kill one, kill the syncer, and show what happens",
    "train": "a local run: a syncer and learners under one supervisor",
    "launch": "a run and its islands from one file: on this machine, Ray, Slurm or Kubernetes",
    "ps": "what there is of a launched run: its syncer and learners, where each is and how it does",
    "logs": "what the syncer or a learner of a launched run has said",
    "scale": "more or fewer learners of one island",
    "down": "end a launched run in order, on whatever engine",
    "data": "pack text into token shards for training, or show a pack",
    "syncer": "serve a run directory to learners anywhere",
    "keys": "who may take part from another machine: issue, revoke, list",
    "learner": "train as one learner of a run, dialling its syncer",
    "status": "where a run stands, by its directory or its syncer's address",
    "top": "a run's learners in a terminal, kept up to date",
    "runs": "which runs are in a folder, and where each stands",
    "dashboard": "the live page of a run, also of one that is paused or finished",
    "report": "what became of a run, as one HTML file; of two runs, side by side",
    "stop": "end what serves a run, in order; with --finish close the run for good",
    "set": "change a run's configuration while it goes on",
    "extend": "give a run another budget while it goes on",
    "drop": "turn a learner out of a run, or let it in again",
    "export": "write a run's model as safetensors",
    "evaluate": "what a run's model is worth: held-out loss, or what a function of yours says",
    "rollback": "list the versions a run has kept, or take it back to one",
    "fork": "begin another run with a run's model",
    "backup": "copy a run while it goes; each backup is whole and was looked at",
    "restore": "list the backups of a run, or make the run of one in a new directory",
    "replay": "recompute a run from its tape and compare, or without one learner",
    "prune": "remove old tape, recorded contributions and kept versions of a long run",
    "chaos": "torture a local run by a fault plan, and measure what it takes",
    "simulate": "the protocol under seeded faults, a fleet's goodput, or a real run's twin",
    "plan": "links, memory and disk a run needs, and what it would get, before anything is bought",
    "lab": "studies of quality: many learners on one device, variants of a run against a baseline",
    "bench": "measure what attaching costs a learner, what a syncer carries, and how quickly it merges",
}
T = TypeVar("T")
NEGATIVE = re.compile(r"-\.?\d")
OVERRIDE = re.compile(r"--([a-z_]+\.[a-z_]+)(?:=(.*))?", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are one line."""

    def error(self, message: str) -> NoReturn:
        raise Refusal(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command; 0 done, 1 crashed, 2 refused, 69 port taken, 75 not now (no room, held), 130 or 143 ended."""
    words = list(sys.argv[1:] if argv is None else argv)
    _words[:] = words
    voice.begin(words)
    as_json = "--json" in words
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _interrupt)
    _interrupts.clear()
    try:
        with _logging_restored(), _terminable():
            code = _dispatch(words)
    except KeyboardInterrupt:  # of a command that has nothing to say about it
        voice.say("interrupted", "error")
        if as_json:
            print_json({"error": "interrupted"})
        code = 128 + (_interrupts[-1] if _interrupts else signal.SIGINT)
    except SkerryError as error:
        line = printable(" ".join(str(error).split()))
        voice.say(line, "error")
        if as_json:
            print_json({"error": line})
        code = error.code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except (MemoryError, OSError, RuntimeError) as error:
        if not _lacks_memory(error):
            raise
        line = "no memory left: end what else takes memory on this machine, or raise the limit (ulimit -v)"
        voice.say(line, "error")
        if as_json:
            print_json({"error": line})
        code = 1  # as after a crash: who supervises it starts it again
    sys.stdout.flush()
    if any(compiler.is_alive() for compiler in _compilers):
        sys.stderr.flush()
        os._exit(code)  # LLVM would go on while the interpreter and its libraries are taken down, and crash
    sys.exit(code)


def _lacks_memory(error: BaseException | None) -> bool:
    """As it is said by Python, by the system, by who loads a library, and by who begins a thread."""
    said = ("failed to map segment", "Cannot allocate memory", "can't start new thread")
    while error is not None:
        is_said = getattr(error, "errno", None) == errno.ENOMEM or any(words in str(error) for words in said)
        if isinstance(error, MemoryError) or is_said:
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def _logging_restored() -> Iterator[None]:
    """What a command set up ends with it: a caller in the same process may close the stderr the command wrote to."""
    handlers, level = logging.root.handlers[:], logging.root.level
    try:
        yield
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends a command as Ctrl-C does, so that it takes away what it has not finished.

    Verbs that answer it in their own way put their handlers in the place of this one, and keep them.
    """
    is_ours = threading.current_thread() is threading.main_thread()
    if is_ours and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        if is_ours and signal.getsignal(signal.SIGTERM) is _interrupt:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


_words: list[str] = []  # of the command that runs
_compilers: list[threading.Thread] = []  # of kernels; one is at it still if an interrupt came
_interrupts: list[int] = []


def _interrupt(number: int, _: object) -> None:
    _interrupts.append(number)
    raise KeyboardInterrupt


def check_interrupted() -> None:
    """After importing other people's code, some of which swallows a Ctrl-C."""
    if _interrupts:
        raise KeyboardInterrupt


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if words[0] == "--version":
        print(f"skerry {__version__}")
        return 0
    verb, rest = words[0], words[1:]
    if verb not in VERBS:
        raise Refusal(f"unknown command {verb!r}: {near(verb, VERBS)}")
    module = __import__(f"skerry.cli.{verb}", fromlist=["run"])
    code: int = module.run(rest)
    return code


def _usage() -> str:
    verbs = "\n".join(f"  {verb:9s} {text}" for verb, text in VERBS.items())
    return f"usage: skerry COMMAND …\n\n{verbs}\n\n`skerry COMMAND --help` tells the rest."


# ---------------------------------------------------------------------------------------------- for the verbs


def command() -> str:
    """The one that runs, as it could be typed again."""
    return shlex.join(["skerry", *_words])


def need(module: str, extra: str, what: str) -> None:
    """Refuse what an extra that is not installed would do."""
    if find_spec(module) is None:
        raise Refusal(f"{what}: needs {module}: pip install 'skerry[{extra}]'")


def warm_up() -> None:
    """Have every kernel compiled, with a word before it to whoever waits, who may well lose patience.

    In a thread of its own: what a signal raises is lost in the compiler's callbacks, so it must not be raised there.
    """
    from skerry import algo

    failures: list[BaseException] = []

    def compile_all() -> None:
        try:
            algo.warm_up(lambda: voice.say(f"{algo.COMPILING} ...", mark=""))
        except BaseException as error:
            failures.append(error)

    compiler = threading.Thread(target=compile_all, name="skerry-kernels", daemon=True)
    _compilers.append(compiler)
    compiler.start()
    compiler.join()
    for failure in failures:
        raise failure


def add_preset(parser: Parser, default: str | None) -> None:
    """--preset; its help is what the presets say of themselves."""
    about = " ".join(f"{name}: {inspect.getdoc(preset)}" for name, preset in configs.PRESETS.items())
    parser.add_argument("--preset", choices=sorted(configs.PRESETS), default=default, help=about)


def flag(option: str) -> str:
    """An option of Python's as a shell has it."""
    return f"--{option.replace('_', '-')}"


def add_secrets(parser: Parser, when: str = "") -> None:
    """--key-file and --token-file of who dials a syncer."""
    parser.add_argument("--key-file", metavar="FILE", help=f"made by skerry keys issue{when} (or SKERRY_KEY_FILE)")
    parser.add_argument("--token-file", metavar="FILE", help=f"the shared secret{when} (or SKERRY_TOKEN_FILE)")
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="dial another machine without a key, as inside a VPN (SKERRY_INSECURE=1)",
    )


def parse(parser: Parser, words: Sequence[str]) -> tuple[argparse.Namespace, list[tuple[str, Any]]]:
    """Options, and dotted overrides such as `--sync.quorum 2` or `--sync.quorum=2`."""
    plain, overrides = _split_overrides(words)
    options, unknown = parser.parse_known_args(_joined(plain))
    if unknown:
        known = [option for action in parser._actions for option in action.option_strings]
        close = difflib.get_close_matches(unknown[0].split("=")[0], known, 1)
        hint = f": did you mean {close[0]}?" if close else ""  # all there are would be no line any more
        parser.error(f"unknown argument {unknown[0]!r}{hint}")
    return options, overrides


def _joined(words: Sequence[str]) -> list[str]:
    """`--chips -1.2e6` as `--chips=-1.2e6`: argparse would take such a number for an option, and miss the value."""
    joined: list[str] = []
    for word in words:
        if NEGATIVE.match(word) and joined and joined[-1].startswith("--") and "=" not in joined[-1]:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _split_overrides(words: Sequence[str]) -> tuple[list[str], list[tuple[str, Any]]]:
    plain: list[str] = []
    overrides: list[tuple[str, Any]] = []
    left = list(words)
    while left:
        word = left.pop(0)
        match = OVERRIDE.fullmatch(word)
        if match is None:
            plain.append(word)
            continue
        if match[2] is None and (not left or left[0].startswith("--")):
            raise Refusal(f"{word}: a value is missing")
        overrides.append((match[1], scalar(match[2] if match[2] is not None else left.pop(0))))
    return plain, overrides


def scalar(text: str) -> Any:
    """A TOML-like scalar: number, true/false, or text."""
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):  # also of bytes that are no text, and of lists in lists without end
        return text


def whole(text: str) -> int:
    """An integer, also written as 1e9."""
    try:
        return int(text)
    except ValueError:
        number = float(text)
    if not number.is_integer():
        raise ValueError(text)
    return int(number)


whole.__name__ = "whole number"  # what argparse calls it when it is not one


def typed(kind: Kind) -> Callable[[str], float]:
    """As an argparse type, whose complaint says why."""

    def read(text: str) -> float:
        try:
            return kind.value(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def counting(kind: Kind) -> Callable[[str], int]:
    """The same, of things that there are only whole numbers of."""

    def read(text: str) -> int:
        value = typed(kind)(text)
        if not value.is_integer():
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
        return int(value)

    return read


def listed(kind: Kind) -> Callable[[str], tuple[int, ...]]:
    """Several of them, between commas."""
    return lambda text: tuple(counting(kind)(one) for one in text.split(","))


def print_json(record: object) -> None:
    sys.stdout.write(msgspec.json.encode(record).decode() + "\n")


def tell(record: T, as_json: bool, show: Callable[[T], None]) -> None:
    """What a command found: to a machine as it is, to a person as `show` has it."""
    if as_json:
        print_json(record)
    else:
        show(record)
