"""Makes the repository's pages a site: those of its root are among them, and links lead where the pages are.

Files that are no pages (examples, source) are named, not linked: the site has none of them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md"} | {name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")}
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)#\s]*)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """Headings have the anchors that they have where the repository is read."""
    config["mdx_configs"]["toc"]["slugify"] = lambda text, _: re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
    return config


def on_files(files: Files, config: Any) -> Files:
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    here = ROOT if page.file.src_uri in PAGES.values() else ROOT / "docs"
    markdown = re.sub(r"(!\[[^\]]*\]\(|src=\")docs/", r"\1", markdown) if here == ROOT else markdown
    return LINK.sub(lambda link: _led(link, here), markdown)


def _led(link: re.Match[str], here: Path) -> str:
    words, path, anchor = link[1], link[2], link[3] or ""
    target = (here / path).resolve()
    if target.parent == ROOT and target.name in PAGES:
        return f"[{words}]({PAGES[target.name]}{anchor})"
    if target.is_relative_to(ROOT / "docs") and target.exists():
        return f"[{words}]({target.relative_to(ROOT / 'docs')}{anchor})"
    return words
