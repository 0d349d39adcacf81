"""Keys at work between real processes: who is let in, and what becomes of a learner whose key is revoked."""

from pathlib import Path

import pytest

from e2e.processes import Puppet, Syncer, facts_of, secret, skerry, until
from skerry.core.messages import Refused
from skerry.errors import JoinTimeout
from skerry.run.keys import Keys
from skerry.shell.learner import fetch_config
from skerry.wire.transport import Received


@pytest.fixture
def keys(tmp_path):
    return Keys(tmp_path / "run")


@pytest.fixture
def issue(keys, tmp_path):
    """A key file of the run for this name."""

    def issue(name, file="", of=keys):
        return secret(tmp_path / (file or f"{name}.key"), of.issue(name).pem.decode())

    return issue


def final_word(puppet):
    """What the syncer says when it turns a learner out; everything before it is passed over."""
    while True:
        event = puppet.inbox.get(timeout=60)
        if isinstance(event, Received) and isinstance(event.message, Refused) and event.message.is_final:
            return event.message.text


def discarded(syncer):
    return syncer.status["tokens"]["discarded"]


def test_a_revoked_learner_is_out_and_its_work_is_booked_while_the_others_go_on(tmp_path, keys, issue):
    a_key, b_key = issue("a"), issue("b")  # before there is a run
    with Syncer(tmp_path, "--keys") as syncer, Puppet(syncer.port, "a", key_file=a_key) as a:
        with Puppet(syncer.port, "b", key_file=b_key) as b:
            b.merge_once()
            b.step += 5
            b._report()
            until(lambda: syncer.status["learners"].get("b", {}).get("step") == b.step, "the last report of b")
            assert skerry("keys", "revoke", syncer.run_dir, "b").returncode == 0
            assert "b was turned out of this run by its operator: its key is revoked" in final_word(b)
        until(lambda: "expelled" in discarded(syncer), "its work to be booked")
        with pytest.raises(AssertionError, match="the key of b is revoked"):
            Puppet(syncer.port, "b", key_file=b_key)
        said = skerry("status", f"127.0.0.1:{syncer.port}", "--key-file", b_key)
        assert said.returncode == 2 and "the key of b is revoked" in said.stderr
        assert a.life == 1 and a.merge_once() and a.merge_once()  # on the connection that it had
        new = issue("b", "new.key")
        with Puppet(syncer.port, "b", key_file=new) as b:  # while it is served
            assert b.life == 2 and b.merge_once()
        tokens = syncer.status["tokens"]
        settled = tokens["merged"] + sum(tokens["discarded"].values())
        assert tokens["produced"] == pytest.approx(settled + tokens["pending"])  # sums over fragments, divided
        syncer.process.terminate()
        syncer.process.wait(60)
    assert skerry("replay", syncer.run_dir).returncode == 0
    assert [fact.learner for fact in facts_of(syncer.run_dir) if getattr(fact, "what", "") == "expelled"] == ["b"]


def test_a_run_directory_may_be_said_as_it_is_seen_from_here(tmp_path, monkeypatch):
    """As in the README: `--run runs/mine`, and orders by the same path."""
    monkeypatch.chdir(tmp_path)
    with Syncer(tmp_path, "--keys", run_dir=Path("runs/mine")) as syncer:
        assert syncer.status["admin"] == "keys/admin.pem"
        assert skerry("set", "runs/mine", "sync.quorum=1").returncode == 0
        assert skerry("stop", "runs/mine").returncode == 0
        assert syncer.process.wait(60) == 0
    with Syncer(tmp_path, "--keys", run_dir=Path("runs/mine")) as syncer:  # and again
        assert skerry("status", f"127.0.0.1:{syncer.port}", "--key-file", "runs/mine/keys/admin.pem").returncode == 0


def test_a_key_that_is_issued_again_ends_the_connection_of_the_one_before(tmp_path, issue):
    old = issue("a", "old.key")
    with Syncer(tmp_path, "--keys") as syncer, Puppet(syncer.port, "a", key_file=old) as before:
        new = issue("a", "new.key")
        assert "the key of a is revoked" in final_word(before)
        with Puppet(syncer.port, "a", key_file=new) as after:
            assert after.life == 2 and after.merge_once()


def test_strangers_are_refused_with_a_line_that_says_what_to_do(tmp_path, issue):
    a_key, other = issue("a"), issue("a", "other.key", of=Keys(tmp_path / "another"))
    with Syncer(tmp_path, "--keys") as syncer:
        assert f"learners need keys: skerry keys issue {syncer.run_dir} NAME" in syncer.said
        with pytest.raises(JoinTimeout, match="certificate is of another run"):  # who knows who that was: it dials on
            fetch_config("127.0.0.1", syncer.port, None, 0.5, key_file=str(other))
        with pytest.raises(AssertionError, match="name a key file of the run"):
            Puppet(syncer.port, "a")
        with pytest.raises(AssertionError, match="its key is that of a, and it calls itself 'b'"):
            Puppet(syncer.port, "b", key_file=a_key)
        for words, says in (
            (["--key-file", a_key], ""),
            (["--key-file", other], "of another run"),
            ([], "name a key file of the run"),
        ):
            told = skerry("status", f"127.0.0.1:{syncer.port}", *words)
            assert told.returncode == (2 if says else 0) and says in told.stderr
        assert skerry("status", syncer.run_dir).returncode == 0


def test_a_learner_with_a_key_says_so_where_the_syncer_has_none(tmp_path, issue):
    key = issue("a")
    with Syncer(tmp_path) as syncer:
        told = skerry("status", f"127.0.0.1:{syncer.port}", "--key-file", key)
        assert told.returncode == 2 and "speaks without TLS" in told.stderr
