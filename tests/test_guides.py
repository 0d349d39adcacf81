"""What the guides name is there: a file that is moved takes its mention with it."""

import re
from pathlib import Path

import pytest

from cli.called import called

ROOT = Path(__file__).parent.parent
GUIDES = ("CONTRIBUTING.md", "docs/ARCHITECTURE.md")
NAMED = re.compile(r"`([a-z_]+/[a-z_/]*[a-z_]+\.(?:py|toml))`(?: `(_?[A-Za-z_]+)`)?")


@pytest.mark.parametrize("guide", GUIDES)
def test_every_file_and_function_that_is_named_is_there(guide):
    for path, function in NAMED.findall((ROOT / guide).read_text()):
        file = next((f for f in (ROOT / path, ROOT / "src/skerry" / path) if f.is_file()), None)
        assert file is not None, f"{guide} names {path}"
        assert re.search(rf"\b{function}\b", file.read_text()), f"{guide} names {function} in {path}"


def test_the_plan_of_the_tutorial_has_no_warning_left(tmp_path, monkeypatch, capsys):
    """Nor is its configuration another than the one that is served a few lines below."""
    text = (ROOT / "docs/TUTORIAL.md").read_text()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "three.toml").write_text(re.search(r"as `three\.toml`:\n\n```toml\n(.*?)```", text, re.DOTALL)[1])
    [words] = re.findall(r"^skerry (plan run .*--config three\.toml.*?)  +#", text, re.MULTILINE)
    code, out, err = called(capsys, *words.split())
    assert (code, err) == (0, "") and "suggested" in out and "warning" not in out
    assert len(re.findall(r"skerry syncer .*--config (?:/srv/)?three\.toml$", text, re.MULTILINE)) == 2


@pytest.mark.parametrize("guide", ["README.md", "docs/TUTORIAL.md"])
def test_where_a_guide_has_learners_dial_another_machine_its_syncer_listens_there_and_they_have_keys(guide):
    """A syncer without `--host` is reached from its own machine alone."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / guide).read_text(), re.MULTILINE | re.DOTALL)
    blocks = [block for block in blocks if "skerry syncer" in block and "SKERRY_SYNCER=" in block]
    assert len(blocks) == 2
    for block in blocks:
        dials = set(re.findall(r"SKERRY_SYNCER=(\S+):7077", block))
        is_open = "--host 0.0.0.0" in block and "SKERRY_KEY_FILE=" in block and "skerry keys issue" in block
        assert dials == ({"host"} if is_open else {"127.0.0.1"})
