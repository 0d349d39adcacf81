"""The pages that are made from the source are what the source says, and leave no key unexplained."""

import importlib.util
from pathlib import Path

import msgspec
import pytest

from skerry import config as configs
from skerry.engines import spec

PAGE = Path(__file__).parent.parent / "docs/reference.py"


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location("reference", PAGE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_page_is_current(reference):
    assert not reference.outdated(), "run python docs/reference.py"


def test_every_key_of_the_configuration_is_explained(reference):
    meanings = reference._comments(Path(configs.__file__))
    tables = {name: type(getattr(configs.Config(), name)) for name in msgspec.to_builtins(configs.Config())}
    keys = [(kind.__name__, key) for kind in tables.values() for key in kind.__struct_fields__]
    assert len(keys) > 60 and not [key for key in keys if not meanings.get(key)]


def test_every_key_of_a_launch_is_explained(reference):
    page = reference.configuration()
    keys = [
        (kind, key) for kind, key in reference._comments(Path(spec.__file__)) if kind in ("Syncer", "Island", "Ray")
    ]
    assert len(keys) > 20 and not [key for key in keys if not reference._comments(Path(spec.__file__))[key]]
    assert "## [[islands]]" in page and "| `islands.workers` |" in page


def test_every_public_name_is_in_the_interface(reference):
    import skerry

    page = reference.api()
    for name in skerry.__all__:
        assert name == "__version__" or f"## skerry.{name}\n" in page
    assert "**`step(" in page and "join_timeout_s" in page
