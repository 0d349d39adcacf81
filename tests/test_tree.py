"""The tree in the README names every file that there is, and no other."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUMMED = ("cli", "train", "plan", "proof")  # folders of src/skerry of which it says in a few words what is in them
STARTS = ("__init__.py", "__main__.py")


def named():
    """Every path in the tree that ends in .py; a name alone is one in the folder that was named last."""
    drawn = (ROOT / "README.md").read_text().partition("## The tree")[2].split("```")[1]
    package, folder = "", ""
    for line in drawn.splitlines():
        if opens := re.match(r"(  )?([\w./]+/)(?=\w+\.py|\s|$)", line):
            folder = package + opens[2] if opens[1] else opens[2]
        elif re.match(r"  \w", line):
            folder = package  # a file of the package itself
        if folder == "src/skerry/":
            package = folder
        yield from (folder + name for name in re.findall(r"(?<![\w.])\w+\.py\b", line))


def belongs(path):
    """Whether the tree should name it."""
    folders = path.split("/")
    if folders[:2] == ["src", "skerry"]:
        return folders[2] not in SUMMED and folders[-1] not in STARTS
    return folders[0] in ("examples", "experiments") and len(folders) == 2  # below is text to train on


def test_every_file_is_in_the_tree_and_what_is_in_it_is_there():
    folders = (ROOT / "src/skerry", ROOT / "examples", ROOT / "experiments")
    there = {str(path.relative_to(ROOT)) for folder in folders for path in folder.rglob("*.py")}
    told = set(named())
    assert sorted(filter(belongs, there - told)) == []
    assert sorted(filter(belongs, told - there)) == []
    assert "src/skerry/core/learner.py" in told and "experiments/engines.py" in told
