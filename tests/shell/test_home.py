"""How many threads a learner's node has for its passes."""

import os

import pytest

from skerry.shell.home import node_threads


@pytest.mark.parametrize("cores, threads", [(1, 1), (2, 1), (7, 1), (8, 2), (16, 4), (128, 4)])
def test_most_cores_are_left_to_the_trainer(monkeypatch, cores, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    assert node_threads() == threads
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert node_threads() == threads, "where the system does not say which cores are its own"
