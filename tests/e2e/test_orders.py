"""An operator's orders to a live run with learners in it, what its tape says of them, and who gives none."""

import json
import os
import subprocess
import sys
import threading

import pytest

from e2e.processes import OPTIONS, Puppet, Syncer, facts_of, secret, skerry, until
from skerry import config as configs
from skerry.core.facts import Committed, Ordered, Paused, PhaseChanged
from skerry.core.messages import ExtendRun, FinishRun, PauseRun, Pull, Refused, SetKeys, Stop
from skerry.core.state import fold
from skerry.errors import NoAnswer, StoreBusy
from skerry.run.keys import Keys
from skerry.run.status import status_of as looked_at
from skerry.shell.identity import read_token
from skerry.shell.orders import _give_here, _give_to_syncer, give
from skerry.store import Store
from skerry.wire.inquiry import give_order
from skerry.wire.server import ORDERS_MAX
from skerry.wire.transport import Received
from store.test_lock import HOLDS

TOKENS = ["--run.tokens=1000000", *(word for word in OPTIONS if not word.startswith("--run.steps"))]


def told(*words, code=0):
    done = skerry(*words, "--json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def orders_of(run_dir):
    return [fact for fact in facts_of(run_dir) if isinstance(fact, Ordered)]


def state_of(run_dir):
    return fold(facts_of(run_dir))


def end(syncer):
    syncer.process.terminate()
    assert syncer.wait() == 0


def heard(puppet, kind):
    """The next message of this kind, whatever came before it."""
    while True:
        event = puppet.inbox.get(timeout=60)
        if isinstance(event, Received) and isinstance(event.message, kind):
            return event.message


def test_a_key_is_set_while_a_learner_trains_and_stays_set_over_a_restart(tmp_path):
    with Syncer(tmp_path) as syncer, Puppet(syncer.port, "a") as a:
        a.merge_once()
        said = told("set", syncer.run_dir, "sync.quorum=2", "outer.lr=0.7")
        assert said["changes"]["sync.quorum"] == {"before": 1, "after": 2} and said["served"] and said["changed"]
        until(lambda: syncer.status["quorum"] == 2, "the quorum to be in force")
        assert not told("set", syncer.run_dir, "sync.quorum=2")["changed"]  # it is so already
        end(syncer)
    (fact,) = orders_of(syncer.run_dir)
    assert (fact.verb, fact.by) == ("set", "admin.token")
    assert [(c.key, c.before, c.after) for c in fact.changes] == [
        ("sync.quorum", "1", "2"), ("outer.lr", "0.4", "0.7"),
    ]  # fmt: skip
    with Syncer(tmp_path, *OPTIONS) as syncer:  # the command that began the run still goes on with it
        assert syncer.status["quorum"] == 2
        said = told("set", syncer.run_dir, "sync.quorum=1")
        with Puppet(syncer.port, "a") as a:
            a.merge_once()
        end(syncer)
    assert skerry("replay", syncer.run_dir).returncode == 0
    last = [fact.decision for fact in facts_of(syncer.run_dir) if isinstance(fact, Committed)][-1]
    assert (last.quorum, last.lr, last.orders) == (1, 0.7, 2)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["sync.quorum=9"], "2 is the most here, and more take a run begun for more"),
        (["wire.codec_up=int8"], "wire.codec_up cannot be changed while a run goes on: learners were told it"),
        (["run.tokens=5"], "the budget is changed with skerry extend"),
        (["sync.quorumm=2"], "unknown key sync.quorumm: did you mean sync.quorum?"),
        (["quorum=2"], "'quorum=2': a key has its table before it: did you mean sync.quorum?"),
        (["sync.quorum"], "write a key and its value, like sync.quorum=3"),
        (["sync.quorum=many"], "sync.quorum = 'many': write a number"),
    ],
)
def test_what_may_not_be_set_is_refused_with_the_reason_live_or_not(paused, words, says):
    done = skerry("set", paused, *words)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def paused(tmp_path_factory):
    """A run that has merged, and that nobody serves."""
    folder = tmp_path_factory.mktemp("paused")
    with Syncer(folder, options=TOKENS) as syncer:
        with Puppet(syncer.port, "a") as a:
            a.merge_once()
        assert skerry("set", syncer.run_dir, "sync.quorum=9").returncode == 2
        end(syncer)
    return syncer.run_dir


def test_orders_to_a_directory_that_nobody_serves_hold_for_the_next_syncer(tmp_path):
    with Syncer(tmp_path, options=TOKENS) as syncer:
        with Puppet(syncer.port, "a") as a:
            a.merge_once()
        end(syncer)
    run_dir = syncer.run_dir
    said = told("extend", run_dir, "--tokens", "2e6")
    assert not said["served"] and said["go_on"].startswith("skerry syncer --run")
    assert told("status", run_dir)["serving"] == "paused"
    assert told("set", run_dir, "store.keep_every=0")["changed"]
    assert told("drop", run_dir, "a")["changed"]
    assert {fact.by for fact in orders_of(run_dir)} == {"the run directory"}
    with Syncer(tmp_path) as syncer:
        assert syncer.status["budget"] == {"tokens": 2000000} and syncer.status["dropped"] == ["a"]
        with pytest.raises(AssertionError, match="dropped with skerry drop"):
            Puppet(syncer.port, "a")
        end(syncer)
    assert skerry("replay", run_dir).returncode == 0


def test_a_run_is_extended_and_its_learner_hears_of_the_lower_progress(tmp_path):
    with Syncer(tmp_path, options=["--run.steps=60", *OPTIONS[1:]]) as syncer, Puppet(syncer.port, "a") as a:
        while a.step < 30:
            a.merge_once()
        said = told("extend", syncer.run_dir, "--steps", "6000")
        assert 0 < said["progress"] < 0.01, "a quarter of the budget before"
        message = a._step_until(lambda message: isinstance(message, Pull))
        assert message.budget == 1 and 0 < message.progress < 0.1
        a.contribute(message.fragment)
        a.merged(message.fragment)
        for words, says in (
            (["--tokens", "1e9"], "the run's budget is in steps, and --tokens was given"),
            (["--steps", "3"], "3 steps are no more than the"),
            ([], "give the whole budget in the run's own unit"),
        ):
            done = skerry("extend", syncer.run_dir, *words)
            assert done.returncode == 2 and says in done.stderr
        end(syncer)
    (fact,) = orders_of(syncer.run_dir)
    assert fact.verb == "extend" and fact.progress == pytest.approx(fact.progress_before / 100)
    with Syncer(tmp_path) as syncer, Puppet(syncer.port, "b") as b:  # a restart of either side
        assert b.merge_once() and syncer.status["progress"] < 0.1
        end(syncer)
    assert skerry("replay", syncer.run_dir).returncode == 0


def test_a_run_is_finished_and_its_learner_hands_in_what_it_has(tmp_path):
    with Syncer(tmp_path) as syncer, Puppet(syncer.port, "a") as a:
        a.merge_once()
        said = told("stop", syncer.run_dir, "--finish")
        assert said["changed"] and "the run closes now" in said["text"]
        heard(a, Stop)
        assert told("stop", syncer.run_dir, "--finish")["changed"] is False
        for verb in (["extend", "--steps", "9999999"], ["set", "sync.quorum=2"]):
            done = skerry(verb[0], syncer.run_dir, *verb[1:])
            assert done.returncode == 2 and "the run is closing" in done.stderr and "skerry fork" in done.stderr
        a.client.close()  # what it does not hand in is waited for, and booked
        assert syncer.wait() == 0
    facts = facts_of(syncer.run_dir)
    assert [fact.verb for fact in facts if isinstance(fact, Ordered)] == ["finish"]
    assert [fact.phase for fact in facts if isinstance(fact, PhaseChanged)] == ["training", "closing", "closed"]
    assert state_of(syncer.run_dir).progress < 1
    done = skerry("extend", syncer.run_dir, "--steps", "9999999")
    assert done.returncode == 2 and "the run is closed" in done.stderr and "skerry fork" in done.stderr
    assert skerry("replay", syncer.run_dir).returncode == 0
    assert skerry("export", syncer.run_dir, "--out", tmp_path / "model.safetensors").returncode == 0


def test_a_run_that_nobody_serves_is_finished_by_the_next_syncer(tmp_path):
    options = [*OPTIONS, "--sync.close_timeout_s=1"]
    with Syncer(tmp_path, options=options) as syncer:
        with Puppet(syncer.port, "a") as a:
            a.merge_once()
        end(syncer)
    done = skerry("stop", syncer.run_dir, "--finish")
    assert done.returncode == 0 and "the next syncer goes by it: skerry syncer" in done.stdout
    done = skerry("syncer", "--run", syncer.run_dir, "--port", "0")
    assert done.returncode == 0 and "the run is closed" in done.stderr
    assert state_of(syncer.run_dir).phase == "closed"


def test_a_dropped_learner_is_out_until_it_is_readmitted_also_of_the_next_syncer(tmp_path):
    with Syncer(tmp_path) as syncer, Puppet(syncer.port, "a") as a:
        with Puppet(syncer.port, "b") as b:
            b.merge_once()
            assert told("drop", syncer.run_dir, "b")["changed"]
            assert "dropped with skerry drop" in heard(b, Refused).text
        a.merge_once()  # the others go on
        with pytest.raises(AssertionError, match="dropped with skerry drop"):
            Puppet(syncer.port, "b")
        done = skerry("drop", syncer.run_dir, "c")
        assert done.returncode == 2 and "no learner 'c' has joined this run" in done.stderr
        syncer.process.kill()
        syncer.process.wait()
    with Syncer(tmp_path) as syncer:
        with pytest.raises(AssertionError, match="dropped with skerry drop"):
            Puppet(syncer.port, "b")
        assert told("drop", syncer.run_dir, "b", "--readmit")["changed"]
        with Puppet(syncer.port, "b") as b:
            assert b.life == 2 and b.merge_once()
        end(syncer)
    assert [(fact.verb, fact.learner) for fact in orders_of(syncer.run_dir)] == [("drop", "b"), ("readmit", "b")]
    assert skerry("replay", syncer.run_dir).returncode == 0


def test_a_syncer_is_stopped_from_elsewhere_by_a_copy_of_its_admin_token(tmp_path):
    with Syncer(tmp_path) as syncer, Puppet(syncer.port, "a") as a:
        a.merge_once()
        copy = secret(tmp_path / "copy", (syncer.run_dir / "admin.token").read_text())
        assert (syncer.run_dir / "admin.token").stat().st_mode & 0o777 == 0o600
        said = told("stop", f"127.0.0.1:{syncer.port}", "--token-file", copy)
        assert said["served"] and syncer.wait() == 0
    paused = [fact for fact in facts_of(syncer.run_dir) if isinstance(fact, Paused)]
    assert [fact.by for fact in paused] == ["admin.token"]
    assert told("status", syncer.run_dir)["serving"] == "paused"


# ---------------------------------------------------------------------------------------------- bad moments


def test_an_order_waits_for_who_holds_the_directory_for_a_moment(tmp_path):
    """Another order, or a syncer that starts: nobody is told to stop the run."""
    with Syncer(tmp_path) as syncer:
        end(syncer)
    words = [sys.executable, "-c", HOLDS, str(syncer.run_dir)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        threading.Timer(0.5, holder.stdin.close).start()
        assert not give(str(syncer.run_dir), SetKeys({"sync.quorum": 2})).is_served
    with Store.open(syncer.run_dir), pytest.raises(StoreBusy, match="try again in a moment"):
        _give_here(syncer.run_dir, SetKeys({"sync.quorum": 1}), within_s=0.0)
    assert [fact.verb for fact in orders_of(syncer.run_dir)] == ["set"]


def test_an_order_whose_syncer_ends_under_it_names_the_run_and_says_what_is_known(tmp_path):
    with Syncer(tmp_path, options=[*OPTIONS, "--sync.close_timeout_s=1"]) as syncer, Puppet(syncer.port, "a") as a:
        a.merge_once()
        status = looked_at(syncer.run_dir)
        syncer.process.kill()
        syncer.process.wait()
        with pytest.raises(
            NoAnswer, match=f"^{syncer.run_dir}: its syncer ended before it answered, and the order may"
        ) as unanswered:
            _give_to_syncer(syncer.run_dir, status, SetKeys({"sync.quorum": 2}))
        assert unanswered.value.code == 75, "it is not refused: a script may give it again"
    assert told("stop", syncer.run_dir, "--finish")["changed"]
    assert skerry("syncer", "--run", syncer.run_dir, "--port", "0").returncode == 0
    with pytest.raises(NoAnswer, match=f"^{syncer.run_dir}: the run was closed before its syncer answered"):
        _give_to_syncer(syncer.run_dir, status, SetKeys({"sync.quorum": 2}))


# ---------------------------------------------------------------------------------------------- who gives none


def refusal(*words):
    done = skerry(*words)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_a_learners_token_gives_no_order_and_the_admins_joins_nothing(tmp_path):
    token = secret(tmp_path / "token", "0123456789abcdef" * 4)
    with Syncer(tmp_path, "--token-file", token) as syncer:
        where, admin = f"127.0.0.1:{syncer.port}", syncer.run_dir / "admin.token"
        assert "the learners' token gives no order" in refusal("set", where, "sync.quorum=2", "--token-file", token)
        assert "the learners' token gives no order" in refusal("set", where, "sync.quorum=2")
        with pytest.raises(AssertionError, match="wrong token"):
            Puppet(syncer.port, "a", token=read_token(admin))
        assert "wrong token" in refusal("status", where, "--token-file", admin)
        assert told("set", where, "sync.quorum=2", "--token-file", admin)["changed"]
        with Puppet(syncer.port, "a", token=read_token(token)):
            pass
        end(syncer)
    assert [fact.by for fact in orders_of(syncer.run_dir)] == ["admin.token"]


def test_no_order_is_proved_by_what_a_link_or_a_pipe_at_the_admin_token_leads_to(tmp_path):
    with Syncer(tmp_path) as syncer:
        path, elsewhere = syncer.run_dir / "admin.token", tmp_path / "elsewhere"
        path.rename(elsewhere)
        path.symlink_to(elsewhere)
        assert "admin.token: the admin token cannot be read" in refusal("set", syncer.run_dir, "sync.quorum=2")
        path.unlink()
        os.mkfifo(path, 0o600)
        assert "cannot be read (is no plain file)" in refusal("set", syncer.run_dir, "sync.quorum=2")
        path.unlink()
        elsewhere.rename(path)
        assert told("set", syncer.run_dir, "sync.quorum=2")["changed"]
        end(syncer)


def test_with_keys_an_admins_key_gives_orders_until_it_is_revoked_and_a_learners_none(tmp_path):
    keys = Keys(tmp_path / "run")
    a_key = secret(tmp_path / "a.key", keys.issue("a").pem.decode())
    assert skerry("keys", "issue", keys.run, "ops", "--admin", "--out", tmp_path / "ops.key").returncode == 0
    ops = tmp_path / "ops.key"
    assert "has had this name" in refusal("keys", "issue", keys.run, "a", "--admin", "--out", tmp_path / "no.key")
    with Syncer(tmp_path, "--keys") as syncer, Puppet(syncer.port, "a", key_file=a_key) as a:
        where = f"127.0.0.1:{syncer.port}"
        assert not (syncer.run_dir / "admin.token").exists()
        line = refusal("set", where, "sync.quorum=2", "--key-file", a_key)
        assert "the key of a is a learner's, which gives no order" in line
        assert "name a key file" in refusal("set", where, "sync.quorum=2")
        with pytest.raises(AssertionError, match="an admin's, which gives orders and joins nothing"):
            Puppet(syncer.port, "ops", key_file=ops)
        assert told("status", where, "--key-file", ops)["run"]
        assert told("set", where, "sync.grace=0.5", "--key-file", ops)["changed"]
        assert told("set", syncer.run_dir, "sync.grace=0.6")["changed"]  # by admin.pem, which the syncer made
        assert skerry("keys", "revoke", keys.run, "ops").returncode == 0
        assert "the key of ops is revoked" in refusal("set", where, "sync.grace=0.7", "--key-file", ops)
        assert a.merge_once()
        end(syncer)
    assert [fact.by for fact in orders_of(syncer.run_dir)] == ["the key of ops", "admin.pem"]
    assert "ops" in skerry("keys", "list", keys.run).stdout


def test_floods_of_orders_and_orders_that_make_no_sense_disturb_nobody(tmp_path):
    with Syncer(tmp_path) as syncer, Puppet(syncer.port, "a") as a:
        token, results = read_token(syncer.run_dir / "admin.token"), []

        def give(order):
            try:
                results.append(give_order("127.0.0.1", syncer.port, order, token).is_done)
            except NoAnswer as error:
                results.append(str(error))

        orders = [SetKeys({"sync.grace": n / 1000}) for n in range(3 * ORDERS_MAX)]
        threads = [threading.Thread(target=give, args=(order,)) for order in orders]
        for thread in threads:
            thread.start()
        a.merge_once()
        for thread in threads:
            thread.join()
        assert results.count(True) >= ORDERS_MAX
        assert all(result is True or "too many orders wait" in result for result in results)
        results.clear()
        for bad in (
            SetKeys({}), SetKeys({"x" * 999: 1}), SetKeys({"sync.quorum": float("nan")}),
            SetKeys({"\x1b[2J": 1}), ExtendRun(tokens=-5), ExtendRun(minutes=float("inf")),
        ):  # fmt: skip
            give(bad)
        assert all(isinstance(result, str) or result is False for result in results), results
        assert all(str(result).isprintable() for result in results)
        a.merge_once()
        end(syncer)
    assert skerry("replay", syncer.run_dir).returncode == 0
    config = configs.decode(state_of(syncer.run_dir).config)
    assert configs.validate(config) and config.sync.quorum == 1


def test_a_run_without_a_step_is_paused_and_not_finished(tmp_path):
    with Syncer(tmp_path) as syncer:
        token = read_token(syncer.run_dir / "admin.token")
        outcome = give_order("127.0.0.1", syncer.port, FinishRun(), token)
        assert not outcome.is_done and "nobody has taken a step yet" in outcome.text
        assert give_order("127.0.0.1", syncer.port, PauseRun(), token).is_done and syncer.wait() == 0
