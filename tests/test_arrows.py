"""The shape of the house: which folder may import which. Product and proof stand apart; imports point inwards."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import skerry

ROOT = Path(skerry.__file__).parent

# What each folder of the product may import, besides itself and the shared leaves.
LEAVES = {
    "errors", "config", "text", "stats", "drawing", "memory", "compiled", "disk", "addresses", "python", "secrecy",
    "__version__",
}  # fmt: skip
INWARDS = {
    "core": set(),
    "data": set(),
    "algo": set(),
    "store": set(),
    "wire": {"core"},
    "node": {"core", "algo", "store", "wire"},
    "run": {"core", "algo", "store", "node"},
    "report": {"core", "run", "store"},
    "shell": {"core", "algo", "store", "wire", "node", "run"},
    "page": {"core", "node", "run"},
    "engines": {"core", "store", "node", "run", "shell"},
    "adapters": {"core", "algo", "node", "run", "shell"},
    "train": {"core", "algo", "data", "store", "run", "shell", "adapters"},
}
PRODUCT = set(INWARDS)
PROOF = {"proof", "plan"}
ONLY_WITH_TORCH = {"adapters", "train", "proof", "cli"}


def imports_of(file):
    """Each `skerry...` name that a file imports, as dotted paths below the package."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:  # `from .tape import`: the folder itself
                inside = file.relative_to(ROOT).parts[: -node.level]
                found.add(".".join(["skerry", *inside, node.module or ""]))
            elif node.module == "skerry":
                found |= {f"skerry.{alias.name}" for alias in node.names}
            else:  # a name may be a module of that package
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def room_of(file):
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def all_imports():
    """(file, its room, the rooms and packages it imports)."""
    for file in sorted(ROOT.rglob("*.py")):
        names = imports_of(file)
        rooms = {name.split(".")[1] for name in names if name.startswith("skerry.")}
        yield str(file.relative_to(ROOT)), room_of(file), rooms, {name.split(".")[0] for name in names}


def test_nothing_imports_the_command_line():
    assert [file for file, room, rooms, _ in all_imports() if "cli" in rooms and room not in ("cli", "__main__")] == []


def test_the_product_does_not_import_what_proves_or_foresees_it():
    outside = {"cli", "__main__", *PROOF}
    assert [file for file, room, rooms, _ in all_imports() if rooms & PROOF and room not in outside] == []


def test_imports_of_the_product_point_inwards():
    strays = {
        file: rooms - LEAVES - {room} - INWARDS[room]
        for file, room, rooms, _ in all_imports()
        if room in PRODUCT and rooms - LEAVES - {room} - INWARDS[room]
    }
    assert strays == {}


def test_only_learners_import_torch():
    assert [file for file, room, _, names in all_imports() if "torch" in names and room not in ONLY_WITH_TORCH] == []


FRAMEWORKS = ("torch", "transformers", "lightning", "pytorch_lightning", "accelerate", "peft", "jax", "numpy")


def said_by(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_a_bare_import_imports_no_framework():
    assert said_by(f"import sys, skerry; print(set({FRAMEWORKS}) & set(sys.modules))") == "set()"


@pytest.mark.parametrize(
    ("public", "needs"), [("hf", "transformers"), ("lightning", "Lightning"), ("jax", "JAX"), ("Learner", "PyTorch")]
)
def test_a_framework_that_is_missing_is_named_with_what_installs_it(public, needs):
    said = said_by(
        f"import sys, traceback, skerry\nsys.modules.update(dict.fromkeys({FRAMEWORKS[:-1]}))\n"
        f"try:\n    skerry.{public}\nexcept ImportError:\n    print(traceback.format_exc())"
    )
    extra = "torch" if public == "Learner" else public
    assert said.endswith(f"ImportError: skerry.{public} needs {needs}: pip install 'skerry[{extra}]'")
    assert said.count("Traceback") == 1, "one is enough"


def test_the_core_is_pure():
    allowed = {
        "__future__",
        "bisect",
        "collections",
        "dataclasses",
        "enum",
        "fractions",
        "functools",
        "heapq",
        "math",
        "operator",
        "typing",
        "msgspec",
        "skerry",
    }
    for file in sorted((ROOT / "core").glob("*.py")):
        assert {name.split(".")[0] for name in imports_of(file)} <= allowed, file.name


def test_the_audit_knows_nothing_of_what_decides():
    """Not through others either: it would agree with whatever is wrong there."""
    known, unread = set(), {"audit"}
    while unread:
        name = unread.pop()
        known.add(name)
        names = imports_of(ROOT / "core" / f"{name}.py")
        unread |= {one.split(".")[2] for one in names if one.startswith("skerry.core.")} - known
    assert known == {"audit", "expected", "facts", "ledger", "state", "vocabulary"}
