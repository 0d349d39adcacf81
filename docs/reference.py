"""Writes docs/CONFIGURATION.md and docs/API.md from the source, so that they say what the code does.

    python docs/reference.py            writes both
    python docs/reference.py --check    says which is not current, and exits with 1; a test does so, too

A key's meaning is the comment behind it in config.py (of what is launched, in engines/spec.py), its bounds are those
that `validate` holds it to. What a public name is for is its docstring.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

import skerry
from skerry import config as configs
from skerry.engines import spec

HERE = Path(__file__).parent
PACKAGE = Path(inspect.getfile(skerry)).parent
GENERATED = "<!-- Made by docs/reference.py from the source: change it there, and run that. -->\n"


def configuration() -> str:
    lines = [
        GENERATED,
        "# Configuration",
        "",
        inspect.getdoc(configs) or "",
        "",
        "Later words win: a preset (`--preset NAME`), then a TOML file (`--config FILE`), then dotted options "
        "(`--sync.quorum 3`). A run keeps what was resolved, and hands it to every learner.",
        "",
        "| preset | what it is |",
        "|---|---|",
        *(f"| `{name}` | {_prose(make.__doc__ or '')} |" for name, make in configs.PRESETS.items()),
    ]
    meanings, bounds = (
        _comments(Path(inspect.getfile(configs))),
        {path: (low, high) for path, low, high in configs._RANGES},
    )
    for table, kind in get_type_hints(configs.Config).items():
        lines += ["", f"## [{table}]", "", _prose(kind.__doc__ or ""), "", "| key | default | may be | meaning |"]
        lines += ["|---|---|---|---|"]
        for key, hint in get_type_hints(kind).items():
            default = getattr(kind(), key)
            may_be = _may_be(hint, bounds.get(f"{table}.{key}"))
            meaning = meanings.get((kind.__name__, key), "")
            lines.append(f"| `{table}.{key}` | `{_shown(default)}` | {may_be} | {_cell(meaning)} |")
    return "\n".join([*lines, *_launch()]) + "\n"


def _launch() -> Iterator[str]:
    """The tables of a file that `skerry launch` reads beside those of the run."""
    meanings = _comments(Path(inspect.getfile(spec)))
    yield from ("", "# What is launched", "")
    yield "`skerry launch FILE` ([engines](ENGINES.md)) takes these tables in the same file; no run reads them."
    for table, kind in get_type_hints(spec._Tables).items():
        kind, heading = (get_args(kind)[0], "[[islands]]") if table == "islands" else (kind, f"[{table}]")
        yield from ("", f"## {heading}", "", _prose(kind.__doc__ or ""), "", "| key | default | may be | meaning |")
        yield "|---|---|---|---|"
        for field in msgspec.structs.fields(kind):
            default = "none" if field.required else f"`{_shown(_default_of(field))}`"
            may_be, meaning = _may_be(field.type, None), _cell(meanings.get((kind.__name__, field.name), ""))
            yield f"| `{table}.{field.name}` | {default} | {may_be} | {meaning} |"


def _default_of(field: msgspec.structs.FieldInfo) -> Any:
    return field.default if field.default is not msgspec.NODEFAULT else field.default_factory()


def _comments(source: Path) -> dict[tuple[str, str], str]:
    """Class and field -> the comment behind the field."""
    with source.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT]
    behind = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.start[1]}
    classes = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)]
    return {
        (node.name, name): behind.get(item.end_lineno or 0, "")
        for node in classes
        for name, item in _fields(node).items()
    }


def _fields(node: ast.ClassDef) -> dict[str, ast.AnnAssign]:
    items = [item for item in node.body if isinstance(item, ast.AnnAssign)]
    return {item.target.id: item for item in items if isinstance(item.target, ast.Name)}


def _may_be(hint: Any, bounds: tuple[float, float] | None) -> str:
    if get_origin(hint) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(hint))
    if bounds is not None:
        return f"{_number(bounds[0])} to {_number(bounds[1])}"
    said = {
        bool: "true or false", str: "text", int: "a whole number", float: "a number", list[str]: "a list of text",
        dict[str, str]: "a table of text", float | list[float]: "a number, or a list of them",
    }  # fmt: skip
    return said.get(hint, "a number or a share")


def _number(value: float) -> str:
    return f"{value:.4g}" if value != int(value) or abs(value) >= 10**7 else f"{int(value):,}"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | dict):
        return str(value)
    return f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else f"{value:,}"


def _prose(text: str) -> str:
    return _cell(" ".join(textwrap.dedent(text).split()))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def api() -> str:
    lines = [GENERATED, "# The Python interface", "", inspect.getdoc(skerry) or ""]
    for name in [
        *(n for n in skerry.__all__ if n != "__version__"),
        "hf.Callback",
        "lightning.Callback",
        "jax.Learner",
    ]:
        lines += ["", f"## skerry.{name}", "", *_entry(name)]
    base = _class_in(BASE, "BaseLearner")
    first = next(item for item in base.body if isinstance(item, ast.FunctionDef) and item.name == "__init__")
    lines += ["", "## Options of every learner", "", "Where a learner takes `**options`, these are they.", ""]
    lines += [*_signature("skerry.…", first), ast.get_docstring(base) or ""]
    return "\n".join(lines) + "\n"


BASE = PACKAGE / "adapters/learner.py"


def _entry(name: str) -> Iterator[str]:
    source, wanted = _source_of(name), name.rpartition(".")[2]
    functions = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.FunctionDef)]
    if function := next((node for node in functions if node.name == wanted), None):
        yield from _signature(f"skerry.{name}", function)
        yield ast.get_docstring(function) or ""
        return
    found = _class_in(source, wanted)
    methods = [item for item in found.body if isinstance(item, ast.FunctionDef)]
    if first := next((item for item in methods if item.name == "__init__"), None):
        yield from _signature(f"skerry.{name}", first)
    yield ast.get_docstring(found) or ""
    if _fields(found) and first is None:
        yield from ["", *_table(source, found)]
    for item in _documented(found):
        yield ""
        yield f"**`{_heading(item)}`** {_prose(ast.get_docstring(item) or '')}"


def _source_of(name: str) -> Path:
    """Read, not imported: frameworks need not be there."""
    where = skerry._PLACES.get(name, f"skerry.adapters.{name.partition('.')[0]}" if "." in name else "skerry.errors")
    return PACKAGE.parent / (where.replace(".", "/") + ".py")


def _class_in(source: Path, name: str) -> ast.ClassDef:
    nodes = ast.parse(source.read_text()).body
    return next(node for node in nodes if isinstance(node, ast.ClassDef) and node.name == name)


def _table(source: Path, found: ast.ClassDef) -> list[str]:
    """The fields of a class, each with the comment behind it."""
    comments = _comments(source)
    rows = [
        f"| `{name}` | `{_cell(ast.unparse(item.annotation))}` | {_cell(comments[found.name, name])} |"
        for name, item in _fields(found).items()
    ]
    return ["| field | type | meaning |", "|---|---|---|", *rows]


def _documented(found: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    """Its own public methods, and those that it has of every learner, that say what they are for."""
    is_learner = any(isinstance(base, ast.Name) and base.id == "BaseLearner" for base in found.bases)
    seen: set[str] = set()
    for node in (found, _class_in(BASE, "BaseLearner")) if is_learner else (found,):
        for item in node.body:
            is_public = isinstance(item, ast.FunctionDef) and not item.name.startswith("_")
            if is_public and item.name not in seen and ast.get_docstring(item):
                seen.add(item.name)
                yield item


def _signature(name: str, function: ast.FunctionDef) -> Iterator[str]:
    words = list(_arguments(function))
    text = ", ".join(words)
    yield "```python"
    yield f"{name}({text})" if len(text) < 80 else f"{name}(\n    " + ",\n    ".join(words) + ",\n)"
    yield "```"
    yield ""


def _arguments(function: ast.FunctionDef) -> Iterator[str]:
    """One a line, as the source has them."""
    args = function.args
    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + list(args.defaults)
    for arg, default in zip(plain, defaults, strict=True):
        if arg.arg != "self":
            yield _argument(arg, default)
    if args.vararg:
        yield f"*{ast.unparse(args.vararg)}"
    elif args.kwonlyargs:
        yield "*"
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield _argument(arg, default)
    if args.kwarg:
        yield f"**{args.kwarg.arg}"


def _argument(arg: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(arg) + (f" = {ast.unparse(default)}" if default is not None else "")


def _heading(function: ast.FunctionDef) -> str:
    if any(isinstance(mark, ast.Name) and mark.id == "property" for mark in function.decorator_list):
        return function.name
    return f"{function.name}({', '.join(_arguments(function))})"


PAGES = {"CONFIGURATION.md": configuration, "API.md": api}


def outdated() -> list[str]:
    """Pages that are not what the source says."""
    return [name for name, make in PAGES.items() if _read(HERE / name) != make()]


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def main() -> int:
    if "--check" in sys.argv:
        for name in (found := outdated()):
            print(f"docs/{name} is not what the source says: run python docs/reference.py", file=sys.stderr)
        return bool(found)
    for name, make in PAGES.items():
        (HERE / name).write_text(make())
    return 0


if __name__ == "__main__":
    sys.exit(main())
