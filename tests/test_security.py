"""SECURITY.md names a test for each attack: each of them is there."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
NAMED = re.compile(r"`(tests/[a-z_0-9/]+\.py)::(test_[a-z_0-9]+)`")


def test_every_test_that_is_named_exists():
    rows = [line for line in (ROOT / "SECURITY.md").read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for row in rows:
        assert NAMED.search(row), f"no test holds: {row}"
        for file, name in NAMED.findall(row):
            assert (ROOT / file).is_file(), file
            known = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if hasattr(node, "name")}
            assert name in known, f"{file} has no {name}"
