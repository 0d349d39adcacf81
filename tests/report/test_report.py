"""`skerry report`: one file that needs nobody, made of any run, in which no text is anything but text."""

import json
import re
import shutil
from html.parser import HTMLParser

import msgspec
import pytest

from cli.called import called
from node.pair import Pair, config_of
from run.test_history import steered, troubled  # noqa: F401
from run.test_prune import config as with_segments
from run.test_prune import pruned, train
from skerry.core.audit import INVARIANTS
from skerry.core.events import Interrupted
from skerry.core.facts import EpochStarted
from skerry.report.compare import comparison
from skerry.report.document import document
from skerry.report.numbers import numbers_of
from skerry.run import provenance
from skerry.store import Store

NASTY = '<script>alert("x")</script>\x1b[31m"\'&'


class Page(HTMLParser):
    """What a browser would make of it: tags that are closed in order, links that stay inside, no script."""

    def __init__(self, html):
        super().__init__()
        self.open, self.ids, self.links, self.words = [], set(), set(), []
        self.feed(html)
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        assert tag not in ("script", "link", "iframe", "img", "object", "form"), tag
        assert not [name for name in given if name.startswith("on") or name in ("src", "srcset")], given
        self.ids |= {given["id"]} if "id" in given else set()
        self.links |= {given["href"]} if "href" in given else set()
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)


def checked(html):
    """A whole page that fetches nothing, and its words."""
    page = Page(html)
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links), page.links
    assert "default-src 'none'" in html and not re.search(r"https?://|url\(|@import|nan|inf\b", html.split("<body>")[1])
    return " ".join(page.words)


def report(capsys, *words):
    code, out, err = called(capsys, "report", *words)
    assert code == 0, err
    return out


def test_a_run_with_failures_has_all_of_them_in_its_report(troubled, tmp_path, capsys):  # noqa: F811
    out = tmp_path / "report.html"
    assert f"wrote {out}" in report(capsys, troubled.root, "--out", out)
    said = checked(out.read_text())
    for words in ("Goodput", "Recoveries", "the syncer died", "its next process stepped", "trained on", "All hold."):
        assert words in said, words
    assert all(line in said for line in INVARIANTS.values())
    assert "sync.num_fragments" in said and "closed" in said


def test_a_run_that_was_steered_has_its_orders_in_its_report(steered):  # noqa: F811
    numbers = numbers_of(steered.root)
    assert numbers["config"]["sync.quorum"] == 1 and numbers["config"]["run.steps"] == 400, "it began with these"
    assert numbers["config_ordered"] == {"sync.quorum": 2, "sync.stall_s": 9.0, "run.steps": 800}
    html = document(numbers)
    said = checked(html)
    assert "Orders have left 3 keys with another value" in said and "Nothing went wrong." in said
    assert re.search(r"<td[^>]*>sync.quorum</td><td[^>]*>1</td><td[^>]*>2</td>", html)
    for words in ("admin.token set sync.quorum from 1 to 2", "admin.token turned b out", "admin.token let b in again"):
        assert words in said, words
    assert "The run was closed by an order of admin.token, at " in said and "the budget is spent" not in said


def test_a_run_without_orders_has_one_value_of_each_key(troubled):  # noqa: F811
    numbers = numbers_of(troubled.root)
    said = checked(document(numbers))
    assert numbers["config_ordered"] == {} and "left by orders" not in said and "the budget is spent" in said


def test_the_numbers_alone(troubled, capsys):  # noqa: F811
    numbers = json.loads(report(capsys, troubled.root, "--json"))
    assert numbers["serving"] == "closed" and numbers["audit"]["violations"] == []
    assert numbers["audit"]["merges"] == numbers["history"]["merges"] > 0 < numbers["audit"]["checks"]
    assert numbers["config"]["sync.num_fragments"] == 3


def test_two_runs_are_compared(troubled, tmp_path, capsys):  # noqa: F811
    with Pair(tmp_path / "other", config_of(steps=60, sync={"sync_every": 6})) as pair:
        pair.join("a")
        pair.close()
    out = tmp_path / "both.html"
    report(capsys, troubled.root, tmp_path / "other", "--out", out)
    said = checked(out.read_text())
    assert "sync.sync_every" in said and "sync.num_fragments" not in said, "what differs, and nothing else"
    told = json.loads(report(capsys, troubled.root, tmp_path / "other", "--json"))
    assert told["differences"]["config"]["sync.sync_every"] == [4, 6]
    merges = [run["history"]["merges"] for run in told["runs"]]
    assert told["differences"]["figures"]["merges"] == merges and merges[0] != merges[1]


def test_a_difference_of_shares_is_said_in_points(troubled):  # noqa: F811
    a, b = (numbers_of(troubled.root) for _ in range(2))
    a["history"]["goodput"], b["history"]["goodput"] = 0.8, 0.9
    said = checked(comparison(a, b))
    assert "+10.0 points" in said and "+12.5 %" not in said


def test_a_run_has_a_report_at_every_time_of_its_life(tmp_path):
    with Pair(tmp_path / "run", config_of(steps=10**4)) as pair:
        assert "the tape says nothing of it yet" in checked(document(numbers_of(pair.root))), "created"
        pair.join("a")
        checked(document(numbers_of(pair.root)))
        pair.until(lambda: min(pair.versions) >= 3)
        checked(document(numbers_of(pair.root)))
        pair.syncer.handle(Interrupted(), pair.now)
        pair.until(lambda: pair.syncer.finished)
    paused = numbers_of(pair.root)
    assert paused["serving"] == "paused" and "paused" in checked(document(paused))


def test_a_pruned_run_has_a_report_of_what_is_left(tmp_path):
    pair = train(tmp_path / "run", with_segments())
    pruned(pair.root, before=2)
    said = checked(document(numbers_of(pair.root)))
    assert "its first part was pruned" in said and "from where it was pruned on" in said and "All hold." in said


def test_whatever_stands_in_a_name_is_text(troubled, tmp_path):  # noqa: F811
    provenance.note(troubled.root, f"skerry syncer {NASTY}")
    numbers = numbers_of(troubled.root)
    h = numbers["history"]
    h["run"] = numbers["warning"] = numbers["run_dir"] = NASTY
    h["learners"][NASTY] = h["learners"].pop("a")
    h["events"][0]["text"] = h["events"][0]["kind"] = NASTY
    numbers["config"][NASTY] = NASTY
    numbers["audit"]["violations"] = [NASTY]
    html = document(numbers)
    said = checked(html)
    assert "<script" not in html and "\x1b" not in html and '<script>alert("x")</script>' in said


def test_a_broken_invariant_is_shown_and_a_report_made(troubled):  # noqa: F811
    before = numbers_of(troubled.root)
    with Store.open(troubled.root) as store:
        store.commit([msgspec.msgpack.encode(EpochStarted(9)), msgspec.msgpack.encode(EpochStarted(3))])
    numbers = numbers_of(troubled.root)
    said = checked(document(numbers))
    assert "Broken." in said and "I13: EpochStarted" in said and "All hold." not in said
    assert numbers["history"]["tokens"] == before["history"]["tokens"], "of what holds"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "check the path"),
        (["run", "run", "run"], "give one, or two to compare"),
        (["run", "--json", "--out", "x.html"], "give one of them"),
        (["run", "--out", "folder"], "is a folder"),
        (["run", "--out", "link"], "is a link, a device or a pipe"),
        (["run", "--out", "no/such/place.html"], "is not a folder"),
        (["run", "--sync.quorum", "2"], "nothing is configured here"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(troubled, tmp_path, monkeypatch, capsys, words, said):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("/dev/null")
    code, _, err = called(capsys, "report", *words)
    assert code == 2 and said in err and err.count("\n") == 1


def test_a_directory_without_a_run_is_refused(tmp_path, capsys):
    Store.open(tmp_path / "run").close()
    code, _, err = called(capsys, "report", tmp_path / "run")
    assert code == 2 and "holds no run" in err


def test_what_worked_on_a_run_is_noted_and_bounded(tmp_path):
    for number in range(provenance.FIRST_MAX + provenance.LAST_MAX + 5):
        provenance.note(tmp_path, f"skerry syncer {number}")
    noted = [one.command for one in provenance.commands_of(tmp_path)]
    assert len(noted) == provenance.FIRST_MAX + provenance.LAST_MAX
    assert noted[0] == "skerry syncer 0" and noted[-1].endswith(str(number))
    assert {"skerry", "python", "numpy"} <= provenance.commands_of(tmp_path)[0].versions.keys()
    (tmp_path / provenance.PROVENANCE).write_text("junk")
    assert provenance.commands_of(tmp_path) == []
    shutil.rmtree(tmp_path)
    provenance.note(tmp_path, "skerry syncer")


def test_how_much_of_the_tape_is_read_is_told_on_the_way(troubled):  # noqa: F811
    told = []
    numbers_of(troubled.root, lambda *words: told.append(words))
    total = sum(path.stat().st_size for path in (troubled.root / "tape").glob("*.seg"))
    assert told and told == sorted(told) and all(0 < done < total == of for done, of in told)
