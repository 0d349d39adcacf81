"""What the guides name is there: a file that is moved takes its mention with it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GUIDES = ("CONTRIBUTING.md", "docs/ARCHITECTURE.md")
NAMED = re.compile(r"`([a-z_]+/[a-z_/]*[a-z_]+\.(?:py|toml))`(?: `(_?[A-Za-z_]+)`)?")


@pytest.mark.parametrize("guide", GUIDES)
def test_every_file_and_function_that_is_named_is_there(guide):
    for path, function in NAMED.findall((ROOT / guide).read_text()):
        file = next((f for f in (ROOT / path, ROOT / "src/skerry" / path) if f.is_file()), None)
        assert file is not None, f"{guide} names {path}"
        assert re.search(rf"\b{function}\b", file.read_text()), f"{guide} names {function} in {path}"
