"""The documentation is a site that is made without the network, whose links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]  # strict: no dead link
    made = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert made.returncode == 0, made.stderr
    return folder


def test_every_page_is_in_it(site):
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} | {"SECURITY", "CONTRIBUTING", "CHANGELOG", "index"}
    assert pages <= {path.stem for path in site.glob("*.html")}


def test_no_page_loads_anything_from_elsewhere(site):
    loaded = re.compile(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=[\"'](?:https?:)?//")
    for page in site.glob("*.html"):
        assert not loaded.search(page.read_text()), page.name
