"""skerry status, on real processes: a run that is served, by its directory and over the wire, and one that is not."""

import json
import os
import signal
import socket
import subprocess

import msgspec
import pytest

from cli.called import called
from e2e.processes import Puppet, Syncer, secret, until, write_genesis
from node.pair import Pair, config_of
from shell.test_syncer import Serving, train
from skerry.cli import live
from skerry.cli.status import progress_of, serving_of, tokens_of
from skerry.core.events import Interrupted
from skerry.core.facts import EpochStarted, Evaluated, LifeStarted
from skerry.core.messages import SetKeys
from skerry.run.evaluations import EVALUATIONS, keep, put_on_tape
from skerry.run.genesis import create_run, read_genesis
from skerry.run.last_words import state_in
from skerry.run.orders import carry_out_here
from skerry.run.status import status_of
from skerry.store import Store
from skerry.store.lock import LOCK
from skerry.text import lasting

TOKEN = "a secret that nobody may see"


@pytest.fixture
def look(capsys):
    """What a person is shown, and what a machine is; nothing is said on stderr."""

    def looked(target, *words):
        code, shown, err = called(capsys, "status", target, *words)
        assert (code, err) == (0, "")
        code, out, err = called(capsys, "status", target, *words, "--json")
        assert (code, err) == (0, "") and out.count("\n") == 1
        return shown, json.loads(out)

    return looked


@pytest.fixture
def refused(capsys):
    def run(*words):
        code, out, err = called(capsys, "status", *words)
        assert (code, out) == (2, "") and err.startswith("skerry: ") and err.count("\n") == 1, err
        line = err.removeprefix("skerry: ").rstrip("\n")
        code, out, err = called(capsys, "status", *words, "--json")
        assert code == 2 and json.loads(out) == {"error": line}
        return line

    return run


def test_a_disk_that_is_about_to_be_full_is_said_with_the_numbers(tmp_path, look, monkeypatch):
    monkeypatch.setattr("skerry.run.room.free_disk", lambda root: 1)
    with Serving(tmp_path) as serving:
        until(lambda: (serving.run_dir / "status.json").exists(), "a status")
        shown, record = look(serving.run_dir)
    assert record["disk"]["free_bytes"] == 1 < record["disk"]["needed_bytes"]
    assert "about to be full: 1 B free, " in " ".join(shown.split())


def test_a_start_says_for_how_long_it_has_been_one(tmp_path, look):
    layout, values = read_genesis(write_genesis(tmp_path / "genesis"))
    with Store.open(tmp_path / "run") as store:
        create_run(store, config_of(), layout, values)
        taken_at = (tmp_path / "run" / LOCK).stat().st_mtime - 7200
        os.utime(tmp_path / "run" / LOCK, (taken_at, taken_at))
        shown, record = look(tmp_path / "run")
    assert record["serving"] == "starting" and record["starting_s"] >= 7200
    assert f"not yet: process {os.getpid()} has been starting or repairing it for {lasting(7200)}" in " ".join(
        shown.split()
    )


def test_a_served_run_is_shown_alike_by_its_directory_and_over_the_wire(tmp_path, look):
    secret(tmp_path / "token", TOKEN)
    token = ["--token-file", tmp_path / "token"]
    with Syncer(tmp_path, *token) as syncer, Puppet(syncer.port, token=TOKEN.encode()) as puppet:
        puppet.merge_once()
        until(lambda: syncer.status["merges"], "a merge in the status")
        address = f"127.0.0.1:{syncer.port}"
        for target, words in ((syncer.run_dir, []), (address, token)):
            shown, record = look(target, *words)
            assert record["serving"] == "served" and record["pid"] == syncer.process.pid
            assert record["merges"] >= 1 and record["budget"] == {"steps": 2_000_000} and len(record["versions"]) == 2
            member = record["learners"]["puppet"]
            assert member["life"] == 1 and member["step"] > 0 and member["heard_s"] >= 0
            assert f"on {address} by process {syncer.process.pid}\n" in plain(shown)
            assert " of 2 fragments with 1.00 contributors" in plain(shown)
            assert "K = 1" in shown and "steps asked" in shown and " of 2,000,000 steps after " in shown
            (line,) = [line for line in shown.splitlines() if line.startswith("puppet")]
            assert line.split()[1] == "1" and "–" in line.split()  # it has no loss to tell
            assert TOKEN not in shown + json.dumps(record)


def test_the_newest_evaluation_is_shown_while_the_run_goes_and_after_its_end(tmp_path, look):
    first, newest = (Evaluated((3, 3), share, 2000, {"loss": loss}, 1e9) for share, loss in ((0.25, 3.0), (0.5, 2.5)))
    with Serving(tmp_path, steps=12) as serving:
        until(lambda: (serving.run_dir / "status.json").exists(), "a status")
        assert "evaluated" not in look(serving.run_dir)[1]
        for one in (first, newest):
            keep(serving.run_dir, one)
        for target in (serving.run_dir, f"127.0.0.1:{serving.port}"):
            until(lambda target=target: "evaluated" in look(target)[1], "an evaluation in the status")
            says_the_newest(*look(target))
        assert train(serving.port) == "done" and serving.ended() == "closed"
    says_the_newest(*look(serving.run_dir))
    put_on_tape(serving.run_dir)
    assert not (serving.run_dir / EVALUATIONS).exists()
    shown, record = look(serving.run_dir)
    says_the_newest(shown, record)
    assert [(point["progress"], point["tokens"]) for point in record["curve"]] == [(0.25, 1000), (0.5, 1000)]
    assert "curve" not in shown


def says_the_newest(shown, record):
    assert record["evaluated"] == {"progress": 0.5, "tokens": 1000.0, "figures": {"loss": 2.5}, "at": 1e9}
    assert "evaluated loss 2.5 at 50.0 % of the budget, 1,000 tokens merged, " in plain(shown)


def test_a_file_of_evaluations_that_cannot_be_read_hides_nothing_else(tmp_path, look):
    with Syncer(tmp_path) as syncer:
        (syncer.run_dir / EVALUATIONS).write_bytes(b"[]\n")
        syncer.signal(signal.SIGTERM)
        assert syncer.wait() == 0
    assert look(syncer.run_dir)[1]["serving"] == "paused"


def test_a_syncer_that_died_is_not_shown_as_living(tmp_path, look):
    with Syncer(tmp_path) as syncer:
        with Puppet(syncer.port) as puppet:
            puppet.merge_once()
            until(lambda: syncer.status["merges"], "a merge in the status")
            merges = puppet.base
        syncer.signal(signal.SIGKILL)
        syncer.wait()
    shown, record = look(syncer.run_dir)
    assert syncer.status["pid"] == syncer.process.pid, "the last status still lies there"
    assert (record["serving"], record["pid"]) == ("died", None) and record["merges"] >= sum(merges)
    assert "not running; its syncer died, last commit at 20" in shown and " ago); go on with: skerry syncer" in shown
    assert record["learners"]["puppet"]["state"] == "away" and record["learners"]["puppet"]["life"] == 1


def test_a_process_that_got_the_number_of_a_dead_one_is_not_taken_for_it(tmp_path, look):
    with Syncer(tmp_path) as syncer:
        syncer.signal(signal.SIGKILL)
        syncer.wait()
    with subprocess.Popen(["sleep", "600"]) as other:
        status = syncer.status | {"pid": other.pid}
        (syncer.run_dir / "status.json").write_text(json.dumps(status))
        (syncer.run_dir / LOCK).write_text(f"{other.pid}\n")
        assert look(syncer.run_dir)[1]["serving"] == "died"
        other.kill()


def test_a_run_that_was_stopped_in_order_is_paused_and_one_never_served_is_new(tmp_path, look):
    with Syncer(tmp_path) as syncer:
        syncer.signal(signal.SIGTERM)
        assert syncer.wait() == 0
    shown, record = look(syncer.run_dir)
    assert record["serving"] == "paused" and "not running; paused at 20" in shown
    assert record["learners"] == {} and record["progress"] == 0.0
    with Store.open(tmp_path / "new") as store:
        create_run(store, config_of(steps=12), *read_genesis(write_genesis(tmp_path / "genesis")))
    shown, record = look(tmp_path / "new")
    assert record["serving"] == "new" and "not running; created at 20" in shown


def test_a_closed_run_says_where_its_model_comes_from(tmp_path, look):
    with Serving(tmp_path, steps=12) as serving:
        assert train(serving.port) == "done" and serving.ended() == "closed"
    shown, record = look(serving.run_dir)
    assert record["serving"] == record["phase"] == "closed" and record["tokens"]["pending"] == 0
    assert "not running; closed at 20" in shown and f"skerry export {serving.run_dir}" in shown


def test_a_syncer_that_has_stopped_writing_is_said_to_be_silent(tmp_path, look, monkeypatch):
    monkeypatch.setattr(live, "SILENT_S", 0.0)
    with Syncer(tmp_path) as syncer:
        shown, _ = look(syncer.run_dir)
    assert " but silent for " in shown


def test_keys_that_this_version_does_not_know_are_shown_as_they_are(tmp_path, look):
    with Syncer(tmp_path) as syncer:
        syncer.signal(signal.SIGSTOP)  # it writes no status meanwhile
        status = syncer.status | {"link": "too narrow for H", "of_tomorrow": 1.5, "nothing": {}}
        (syncer.run_dir / "status.json").write_text(json.dumps(status))
        shown, record = look(syncer.run_dir)
        syncer.signal(signal.SIGCONT)
    assert record["link"] == "too narrow for H"
    assert "link too narrow for H\n" in plain(shown) and "of tomorrow 1.5\n" in plain(shown)
    assert "nothing" not in shown


def test_what_is_left_is_said_while_somebody_trains(tmp_path, look):
    with Syncer(tmp_path) as syncer:
        syncer.signal(signal.SIGSTOP)
        row = {"state": "training", "index": 0, "step": 5, "tokens": 50, "tokens_per_s": 9.0, "life": 1}
        status = syncer.status | {"progress": 0.25, "elapsed_s": 60.0}
        for state, is_said in (("training", True), ("lost", False), ("left", False), ("stalled", False)):
            record = json.dumps(status | {"learners": {"a": row | {"state": state}}})
            (syncer.run_dir / "status.json").write_text(record)
            shown, _ = look(syncer.run_dir)
            assert ("about 3 min left" in plain(shown)) == is_said, shown
        syncer.signal(signal.SIGCONT)


def test_what_cannot_be_looked_at_is_refused_in_one_line(tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    assert refused("nowhere") == "nowhere: is no run directory: check the path, or name a syncer as host:port"
    assert refused("file") == "file: is no run directory: check the path, or name a syncer as host:port"
    assert "empty holds no run: check the path" in refused("empty")
    assert refused("host:x") == "'host:x' is no address of a syncer: write host:port"
    assert "none: the token cannot be read" in refused("127.0.0.1:1", "--token-file", "none")
    assert "--sync.quorum: nothing is configured here" in refused("empty", "--sync.quorum", "2")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert refused(f"127.0.0.1:{port}").startswith(f"127.0.0.1:{port}: connection refused")


def test_a_wrong_token_is_refused_in_one_line(tmp_path, refused, monkeypatch):
    monkeypatch.delenv("SKERRY_TOKEN_FILE", raising=False)
    secret(tmp_path / "token", TOKEN)
    secret(tmp_path / "wrong", "another that is long enough")
    with Syncer(tmp_path, "--token-file", tmp_path / "token") as syncer:
        address = f"127.0.0.1:{syncer.port}"
        assert "requires a token" in refused(address)
        line = refused(address, "--token-file", tmp_path / "wrong")
    assert line.startswith(f"{address}: wrong token: name a copy of the syncer's file") and TOKEN not in line


def plain(shown):
    """Without what only makes columns."""
    return "".join(" ".join(line.split()) + "\n" for line in shown.splitlines())


def test_merged_work_that_the_budget_is_not_for_is_told():
    """Else progress and what is merged would not fit, and the books would look wrong."""
    tokens = {"produced": 950.0, "merged": 900.0, "pending": 50.0, "discarded": {}}
    record = {"budget": {"tokens": 5000}, "progress": 0.1, "tokens": tokens}
    told = "; 450 of them are not of the budget: done alone for more than learner.alone_steps_max steps"
    assert tokens_of(record).endswith(told)
    for other in ({"progress": 0.19}, {"progress": 1.0}, {"budget": {"minutes": 5}}, {"budget": {}}):
        assert tokens_of(record | other).endswith("discarded: none")


def test_no_time_left_is_promised_while_too_few_are_there_for_a_merge():
    learners = {name: {"state": "training"} for name in "ab"}
    record = {"serving": "served", "phase": "steady", "progress": 0.5, "elapsed_s": 60.0, "learners": learners}
    record |= {"budget": {"tokens": 1000}}
    assert "about 1 min left" in progress_of(record | {"quorum": 2})
    assert "left" not in progress_of(record | {"quorum": 3})


def test_a_run_is_paused_since_its_syncer_ended_whatever_was_ordered_since(tmp_path):
    with Pair(tmp_path / "run", config_of()) as pair:
        pair.join("a")
        pair.until(lambda: min(pair.versions) >= 2)
        pair.syncer.handle(Interrupted(), pair.now)
        pair.syncer.look(pair.now)
    before = status_of(pair.root)
    with Store.open(pair.root, clock=lambda: before["at"] + 5000.0) as store:
        carry_out_here(store, state_in(store), SetKeys({"sync.grace": 0.75}))
    after = status_of(pair.root)
    assert (after["serving"], after["at"], after["orders"]) == ("paused", before["at"], 1)


def test_a_syncer_that_died_of_a_full_disk_is_said_to_have_and_how_to_make_room(tmp_path, look, capsys, monkeypatch):
    with Pair(tmp_path / "run", config_of()) as pair:
        pair.join("a")
        pair.until(lambda: min(pair.versions) >= 2)
    record = status_of(pair.root)
    assert record["serving"] == "died" and record["free_bytes"] > 0
    assert "why" not in record and "its syncer died" in serving_of(record, pair.root)
    monkeypatch.setattr("skerry.run.status.free_disk", lambda root: 0)
    shown, record = look(pair.root)
    assert (record["serving"], record["why"]) == ("died", "the disk is full (0 B free)")
    room = f"make room first, as with skerry prune {pair.root}; then go on with: "
    assert f"the disk is full (0 B free): {room}" in " ".join(shown.split())
    code, shown, _ = called(capsys, "stop", pair.root)
    assert code == 0 and "; the disk is full (0 B free)\n" in shown and shown.splitlines()[1].startswith(room)
    code, shown, _ = called(capsys, "stop", pair.root, "--json")
    assert json.loads(shown)["why"] == record["why"]


def test_no_escape_code_of_a_tape_that_nobody_serves_reaches_a_terminal(tmp_path, look):
    escape = "\x1b[31m\x1b]0;owned\x07\r\n\u202e"
    with Store.open(tmp_path / "run") as store:
        create_run(store, config_of(), *read_genesis(write_genesis(tmp_path / "genesis.safetensors")))
        facts = (EpochStarted(1), LifeStarted(escape, 1, escape, 0, 0.0))
        store.commit([msgspec.msgpack.encode(fact) for fact in facts])
    shown, record = look(tmp_path / "run")
    assert all(c.isprintable() or c == "\n" for c in shown) and "\\x1b[31m" in shown
    assert all(name.isprintable() for name in record["learners"])
