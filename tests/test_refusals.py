"""Every refusal names the thing, the place and the next step, in the words of whoever reads it.

The list is the source itself: each place where an error of ours is made, and the words that stand there.
"""

import ast
from pathlib import Path
from typing import NamedTuple

import pytest

import skerry
from skerry import errors

PACKAGE = Path(skerry.__file__).parent
KINDS = {
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.SkerryError) and kind is not errors.ProtocolError
}  # a ProtocolError is what a log says of a peer: nobody here can mend that
PYTHON = ("adapters/", "core/", "node/", "shell/beside.py", "shell/home.py", "shell/learner.py", "shell/identity.py")


class Said(NamedTuple):
    place: str
    words: str  # with {} for what is put in


def words_of(node):
    match node:
        case ast.Constant(value=str()):
            return node.value
        case ast.JoinedStr():
            return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        case ast.BinOp(op=ast.Add()):
            parts = words_of(node.left), words_of(node.right)
            return "".join(part or "{}" for part in parts) if any(parts) else None
        case ast.Call(func=ast.Name(id="one_line"), args=[first, *_]):
            return words_of(first)
    return None


def refusals():
    for file in sorted(PACKAGE.rglob("*.py")):
        place = str(file.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS and node.args:
                words = words_of(node.args[0])
                if words is not None and words.replace("{}", "").strip(" :/()"):
                    yield Said(f"{place}:{node.lineno}", words)


SAID = list(refusals())


def test_there_is_a_list():
    assert len(SAID) > 300 and any("no run directory" in said.words for said in SAID)


@pytest.mark.parametrize("said", SAID, ids=lambda said: said.place)
def test_a_refusal_is_one_line_with_the_thing_and_what_follows(said):
    assert "\n" not in said.words and len(said.words) < 420
    is_made_elsewhere = said.words.count("{}") >= 2 and len(said.words.replace("{}", "").split()) <= 4
    assert is_made_elsewhere or ": " in said.words or "; " in said.words, f"what is to be done about {said.words!r}?"
    assert said.words[-1] not in ".!", "no full stop, no shouting"


@pytest.mark.parametrize("said", [s for s in SAID if s.place.startswith(PYTHON)], ids=lambda said: said.place)
def test_who_writes_python_is_told_of_arguments_and_not_of_flags(said):
    told = said.words.replace("torchrun starts it again where --max-restarts", "")  # torchrun's own
    assert " --" not in f" {told}", told
