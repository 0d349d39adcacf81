"""A function of somebody else's: found, called, its answer understood, and its errors shown as its own."""

import sys

import numpy as np
import pytest

from skerry.errors import HookFailed
from skerry.run.hook import ask, find, understood

ARRAYS = {"w": np.ones(3, np.float32)}


@pytest.fixture
def judge(tmp_path, monkeypatch):
    """A module in the working directory, as its author would have it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        return name

    yield write
    for name in [name for name in sys.modules if name.startswith("judge_")]:
        del sys.modules[name]


def test_it_is_found_in_the_working_directory_and_asked(judge, capsys):
    name = judge(
        "judge_sum", "def score(tensors):\n    print('hm')\n    return sum(a.sum() for a in tensors.values())\n"
    )
    assert ask(find(f"{name}:score"), f"{name}:score", ARRAYS) == {"value": 3.0}
    said = capsys.readouterr()
    assert said.out == "" and said.err == "hm\n"


@pytest.mark.parametrize(
    ("said", "means"),
    [
        (2, {"value": 2.0}),
        (np.float32(0.5), {"value": 0.5}),
        (np.array(3), {"value": 3.0}),
        ({"loss": 1, "hits": np.int64(4)}, {"loss": 1.0, "hits": 4.0}),
    ],
)
def test_a_number_or_numbers_by_name(said, means):
    assert understood(said, "judge:score") == means


@pytest.mark.parametrize("said", [None, [1, 2], "good", "3.5", b"3", {"loss": None}, np.ones(3)])
def test_anything_else_is_refused(said):
    with pytest.raises(HookFailed, match=r"^judge:score returned a .*: return a number, or a dict of numbers by name$"):
        understood(said, "judge:score")


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({}, "returned an empty dict: return at least one number by name"),
        ({"a": {"b": 1}}, "returned a dict for 'a': return a number, or a dict of numbers by name"),
        ({"ok": 1, "a": "3.5"}, "returned a str for 'a': return a number, or a dict of numbers by name"),
        (10**400, "returned a number that is larger than a float can be: return a smaller one"),
        ({"a": 10**400}, "returned a number for 'a' that is larger than a float can be: return a smaller one"),
    ],
)
def test_what_is_refused_is_named(said, says):
    with pytest.raises(HookFailed) as failed:
        understood(said, "judge:score")
    assert str(failed.value) == f"judge:score {says}"


def test_one_that_ends_the_process_does_not(judge):
    name = judge("judge_exits", "import sys\n\ndef score(tensors):\n    sys.exit('enough')\n")
    with pytest.raises(HookFailed, match=r"^judge_exits:score called sys\.exit\('enough'\): return a number") as failed:
        ask(find(f"{name}:score"), f"{name}:score", ARRAYS)
    assert failed.value.__cause__ is None, "there is nothing to show of it"
    judge("judge_gone", "raise SystemExit(3)\n")
    with pytest.raises(HookFailed, match=r"^judge_gone cannot be imported \(it called sys\.exit\(3\)\)"):
        find("judge_gone:score")


def test_its_own_error_is_the_cause(judge):
    name = judge("judge_bad", "def score(tensors):\n    return tensors['none']\n")
    with pytest.raises(HookFailed, match=r"^judge_bad:score raised KeyError: 'none'$") as failed:
        ask(find(f"{name}:score"), f"{name}:score", ARRAYS)
    assert isinstance(failed.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("score", "'score' names no function: write module:function"),
        (":score", "names no function"),
        ("judge_none:score", "judge_none cannot be imported (ModuleNotFoundError"),
        ("judge_empty:score", "judge_empty has no function score"),
        ("judge_broken:score", "judge_broken cannot be imported (ZeroDivisionError"),
    ],
)
def test_what_cannot_be_found_is_refused(judge, name, says):
    judge("judge_empty", "score = 3\n")
    judge("judge_broken", "1 / 0\n")
    with pytest.raises(HookFailed) as failed:
        find(name)
    assert says in str(failed.value)
