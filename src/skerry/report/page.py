"""The page around a report: its look, and the few pieces of HTML that reports are made of. All text is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from skerry.errors import printable

STYLE = files("skerry.report").joinpath("style.css").read_text()


class Raw(str):
    """HTML that was made here; any other text is escaped."""


def page(title: str, body: Iterable[str]) -> str:
    """The whole file. Its policy lets nothing be fetched and nothing run, whatever stood in a name."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><title>{text(title)}</title>'
        f"<style>{STYLE}</style>"
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"


def text(said: object) -> str:
    """As it can stand in HTML, and in a terminal that shows the file."""
    return said if isinstance(said, Raw) else escape(printable(str(said)))


def section(name: str, title: str, *parts: str) -> str:
    return f'<section id="{name}"><h2>{text(title)}</h2>' + "\n".join(part for part in parts if part) + "</section>"


def contents(names: Sequence[tuple[str, str]]) -> str:
    return "<nav>" + " ".join(f'<a href="#{name}">{text(title)}</a>' for name, title in names) + "</nav>"


def note(said: str) -> str:
    return f'<p class="soft">{text(said)}</p>'


def cards(items: Iterable[tuple[str, str, str]]) -> str:
    """A figure, what it is, and what is to be said with it."""
    made = (
        f"<div><span>{text(name)}</span><b>{text(value)}</b><span>{text(more)}</span></div>"
        for name, value, more in items
    )
    return f'<div class="cards">{"".join(made)}</div>'


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = (), wide: Sequence[int] = ()
) -> str:
    """`numbers` are the columns that are set to the right, `wide` those whose words may break anywhere."""

    def cell(kind: str, at: int, said: str) -> str:
        name = ' class="n"' if at in numbers else ' class="w"' if at in wide and kind == "td" else ""
        return f"<{kind}{name}>{text(said)}</{kind}>"

    head = "".join(cell("th", at, said) for at, said in enumerate(heads))
    body = "".join("<tr>" + "".join(cell("td", at, said) for at, said in enumerate(row)) + "</tr>" for row in rows)
    if not body:
        return '<p class="none">There is none.</p>'
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
