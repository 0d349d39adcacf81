"""A job that is broken off goes on where it was saved, and ends with the bits of one that never was."""

from __future__ import annotations

from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from proof.lab.test_laboratory import DEATHS, MBIT_S, SLOW, job_of
from skerry.errors import StudyError
from skerry.proof.lab import saves
from skerry.proof.lab.job import run
from skerry.proof.lab.saves import Course, Head, Origin, TimeUpError, read, tensors_of, write
from skerry.proof.lab.study import Job, Result, Stint, Trial

JOBS: dict[str, Job] = {
    "data-parallel": job_of(data_parallel=True),
    "muon, data-parallel": job_of(data_parallel=True, trial=Trial(optimizer="muon")),
    "equal speeds": job_of(),
    "deaths on slow machines": job_of(delays=SLOW, **DEATHS),
    "one comes for the middle half, over a slow link": job_of(away_half=1, mbit_s=MBIT_S),
    "blend": job_of({"learner.adopt": "blend"}, speeds=(1, 0.5)),
    "a trial": job_of(keep_optimizer=True, trial=Trial(optimizer="muon", steer=1.0, kept=0.5), **DEATHS),
}


class Broken(Exception):
    """What happens to a job from outside."""


def told_until(point: int) -> Any:
    """Called at every point of the curve; breaks the job off at this one."""
    left = iter(range(point))

    def told(progress: float) -> None:
        if next(left, None) is None:
            raise Broken

    return told


def bits_of(result: Result | None) -> bytes:
    assert result is not None
    return msgspec.json.encode(msgspec.structs.replace(result, seconds=0.0))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


# ---------------------------------------------------------------------------------------------- going on


@pytest.mark.parametrize("name", JOBS)
def test_a_job_that_was_broken_off_ends_with_the_bits_of_an_unbroken_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saves, "SAVE_S", 0.0)  # so at every tick
    job = msgspec.structs.replace(JOBS[name], setting=msgspec.structs.replace(JOBS[name].setting, points=10))
    stint = Stint(tmp_path / "saves" / "job.safetensors")
    for point in (0, 0, 3, 2):  # of those that it has not seen yet
        with pytest.raises(Broken):
            run(job, "cpu", told_until(point), stint)
    assert bits_of(run(job, "cpu", stint=stint)) == bits_of(run(job, "cpu"))


@pytest.mark.parametrize("name", ["data-parallel", "deaths on slow machines"])
def test_a_job_that_never_has_time_gets_on_by_a_tick_and_ends_the_same(name: str, tmp_path: Path) -> None:
    """So it is broken off everywhere, in the closing too."""
    config = msgspec.structs.replace(JOBS[name].config, run=msgspec.structs.replace(JOBS[name].config.run, steps=8))
    job = msgspec.structs.replace(JOBS[name], config=config)
    stint = Stint(tmp_path / "job.safetensors", until=0.0)
    times = 0
    while (result := run(job, "cpu", stint=stint)) is None:
        times += 1
    assert times >= config.run.steps and bits_of(result) == bits_of(run(job, "cpu"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_job_goes_on_on_a_gpu_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the last bits differ from run to run."""
    monkeypatch.setattr(saves, "SAVE_S", 0.0)
    job, stint = JOBS["equal speeds"], Stint(tmp_path / "job.safetensors")
    with pytest.raises(Broken):
        run(job, "cuda", told_until(1), stint)
    broken, whole = run(job, "cuda", stint=stint), run(job, "cuda")
    assert broken is not None and whole is not None and broken.loss == pytest.approx(whole.loss, rel=1e-3)


def test_a_job_with_time_enough_is_not_saved(tmp_path: Path) -> None:
    stint = Stint(tmp_path / "job.safetensors")
    run(job_of({"run.steps": 4}, data_parallel=True), "cpu", stint=stint)
    assert not stint.file.exists()


# ---------------------------------------------------------------------------------------------- what is alive


def test_every_tensor_is_found_once_wherever_it_hides() -> None:
    class Holder:
        __slots__ = ("inside",)

        def __init__(self, inside: object) -> None:
            self.inside = inside

        def method(self) -> None: ...

    class Record(msgspec.Struct):
        first: object
        second: object

    tensors = [torch.full((2,), n) for n in range(7)]
    hidden = tensors[4]
    root = {
        "list": [tensors[0], (tensors[1], tensors[0])],
        "deque": deque([Record(tensors[2], tensors[1])]),
        "partial": partial(print, tensors[3], end=""),
        "closure": lambda: hidden,
        "method": Holder(tensors[5]).method,
        "object": Holder([tensors[6], tensors[6]]),
    }
    root["itself"] = root
    found = tensors_of(root)
    assert len(found) == len(tensors) and all(one is other for one, other in zip(found, tensors, strict=True))


# ---------------------------------------------------------------------------------------------- the file

ORIGIN = Origin("0123456789abcdef", "slate", {"torch": "2"})
ARRAYS = [np.arange(6, dtype=np.float32).reshape(2, 3), np.array(7), np.array([True, False])]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "job.safetensors"
    write(file, Head(origin=ORIGIN, ticks=3, mark="here"), ARRAYS)
    return file


def test_what_is_read_is_what_was_written_and_nothing_else_is_left(file: Path) -> None:
    head, arrays = read(file, ORIGIN)
    assert head == Head(origin=ORIGIN, ticks=3, mark="here")
    assert [(a.dtype, a.shape, a.tobytes()) for a in arrays] == [(a.dtype, a.shape, a.tobytes()) for a in ARRAYS]
    assert list(file.parent.iterdir()) == [file]


def test_no_bit_of_a_save_may_change(file: Path) -> None:
    whole = file.read_bytes()
    for place in range(len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            head, arrays = read(file, ORIGIN)
        except StudyError as error:
            assert str(file) in str(error) and "\n" not in str(error)
            assert str(error).endswith(": remove it, and its job begins anew")
        else:  # a space in the header
            assert head.ticks == 3 and [a.tobytes() for a in arrays] == [a.tobytes() for a in ARRAYS]


@pytest.mark.parametrize("length", [0, 7, 100, -1])
def test_a_save_that_is_cut_short_is_refused(file: Path, length: int) -> None:
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(StudyError, match="is no save of this version"):
        read(file, ORIGIN)


@pytest.mark.parametrize("change", [{"key": "fedcba9876543210"}, {"device": "chalk"}, {"versions": {"torch": "3"}}])
def test_a_save_of_another_is_refused_and_stays(file: Path, change: dict[str, Any]) -> None:
    whole = file.read_bytes()
    with pytest.raises(StudyError, match=f"is another's: {next(iter(change))} was .*, is .*: remove it"):
        Course(msgspec.structs.replace(ORIGIN, **change), Stint(file))
    assert file.read_bytes() == whole


def test_a_save_to_which_no_way_leads_any_more_is_refused(tmp_path: Path) -> None:
    stint = Stint(tmp_path / "job.safetensors", until=0.0)
    course = Course(ORIGIN, stint)
    with pytest.raises(TimeUpError):
        course.passed([torch.zeros(2)], (), lambda: "here")
    for root, mark in (([torch.zeros(2)], "elsewhere"), ([torch.zeros(3)], "here"), ([], "here")):
        with pytest.raises(StudyError, match="the way there is another now"):
            Course(ORIGIN, stint).passed(root, (), partial(str, mark))
