"""The file of results, which only grows: one JSON object a line, on the disk before the next is waited for.

A result counts for a job if it has that job's key, whoever made it, so a study goes on where it was stopped, and a
variant of two studies is run once.
"""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec.structs import replace

from skerry.config import Config, Merge
from skerry.errors import StudyError
from skerry.proof.lab.study import Job, Result, Setting, deciding, digest
from skerry.run.delays import NONE

RESULTS = "results.jsonl"
SAVES = ".saves"  # of the folder beside a file of results with the jobs that are under way
BEGINNING = b'{"key":'  # of a result's line: what begins otherwise is somebody else's, and stays


class Results:
    """A file of results, one JSON object a line; of two with the same key the later counts."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.warning = ""
        self._by_key: dict[str, Result] = {}
        self._by_name: dict[tuple[str, str, int], Result] = {}
        self._outdated: dict[tuple[str, str, int], str] = {}  # those that count no more, and why
        if file.exists() and not file.is_file():  # a pipe or device would never end
            raise StudyError(f"{file}: is no file: name one, there or not yet, with --results")
        try:
            lines = file.read_bytes().split(b"\n")
        except FileNotFoundError:
            return
        except OSError as error:
            raise StudyError(f"{file}: cannot be read ({error.strerror}): check --results") from None
        if _is_torn(lines[-1]):
            self.warning = f"{file}: the last line is torn and not counted; its job runs again"
            lines.pop()
        for number, line in enumerate(lines, 1):
            if line.strip():
                self._add(decoded(f"{file}:{number}", line))

    def _add(self, result: Result) -> None:
        name = (result.study, result.variant, result.seed)
        try:
            self._by_key[_key_today(result)] = result
            self._by_name[name] = result
        except OutdatedError as error:
            self._outdated[name] = str(error)

    def of(self, job: Job) -> Result | None:
        return self._by_key.get(job.key)

    def why_again(self, job: Job) -> str:
        """Why a job without a result has one under its name; empty if it has none."""
        name = (job.study, job.variant, job.seed)
        if name in self._by_name:
            return f"its result is of another configuration: {_first_change(self._by_name[name], job)}"
        return f"its result counts no more: {self._outdated[name]}" if name in self._outdated else ""

    def named(self, study: str, variant: str) -> dict[int, Result]:
        """By seed, what this study's variant gave last."""
        return {name[2]: result for name, result in self._by_name.items() if name[:2] == (study, variant)}

    def append(self, result: Result) -> None:
        """On the disk when this returns; what a crash left of a line is cut off first."""
        line = msgspec.json.encode(result) + b"\n"
        with self._opened() as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # another process may add to the same file
            file.seek(0)
            last = file.read().split(b"\n")[-1]
            if _is_torn(last):
                file.truncate(file.tell() - len(last))
            elif last:
                line = b"\n" + line
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._add(result)

    def save_of(self, job: Job) -> Path:
        """Where a job that is under way is saved."""
        return self.file.absolute().with_suffix(SAVES) / f"{job.key}.safetensors"

    def check_writable(self) -> None:
        with self._opened():
            pass

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a+b") as file:
                yield file
        except OSError as error:
            raise StudyError(
                f"{self.file}: cannot be written ({error.strerror}): choose another with --results"
            ) from None


def _is_torn(line: bytes) -> bool:
    """Whether the bytes after the last line end are the beginning of a result, and no more."""
    if not line or not BEGINNING.startswith(line[: len(BEGINNING)]):
        return False
    try:
        msgspec.json.decode(line)
    except RecursionError:  # as far as it can be read it is no beginning of one: refused, not taken out
        return False
    except ValueError:
        return True
    return False


def decoded(where: str, line: bytes) -> Result:
    try:
        record = msgspec.json.decode(line)
        if isinstance(record, dict):
            record = _with_nan(record)
            if isinstance(points := record.get("points"), list):
                record["points"] = [_with_nan(point) if isinstance(point, dict) else point for point in points]
        return msgspec.convert(record, Result)
    except (ValueError, RecursionError) as error:
        raise StudyError(f"{where}: is no result of this version ({error}): mend the line or take it out") from None


def _with_nan(record: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: where a run diverged stands null."""
    lost = {key: math.nan for key in ("loss", "loss_before_close") if key in record and record[key] is None}
    return record | lost


class OutdatedError(Exception):
    """A result that no job of today would give."""


def _key_today(result: Result) -> str:
    """What the key of this result's job is now that the configuration may have grown."""
    if result.key != digest(result.config, result.setting):
        raise OutdatedError("the laboratory computes differently now")
    return digest(*_tables_today(result))


def _tables_today(result: Result) -> tuple[dict[str, Any], dict[str, Any]]:
    """All it was run with, the keys that came later at their defaults; so is one that decided nothing."""
    try:
        config, setting = msgspec.convert(_as_run(result.config), Config), msgspec.convert(result.setting, Setting)
    except msgspec.ValidationError as error:
        raise OutdatedError(f"today's configuration refuses its own: {error}") from None
    if setting.delays == NONE:  # merges take no time, whoever computes them
        config = replace(config, merge=replace(config.merge, threads=Merge().threads))
    return msgspec.to_builtins(config), msgspec.to_builtins(setting)


def _as_run(config: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Before there was a key for it tensors were whole, whatever its default is today."""
    return config | {"sync": {"cut_tensors": False} | config.get("sync", {})}


def _first_change(result: Result, job: Job) -> str:
    before, now = deciding(*_tables_today(result)), deciding(*job.tables)
    return next(
        f"{table}.{key} was {before[table][key]}, is {now[table][key]}"
        for table in now
        for key in now[table]
        if table in before and before[table][key] != now[table][key]
    )
