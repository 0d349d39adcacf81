"""A learner's whole life, as its training loop sees it: how it is named an address, waits, is alone, and leaves."""

import logging
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import skerry
from adapters.test_arrays import arrays_of
from e2e.processes import OPTIONS, Syncer, facts_of, until
from skerry.core.facts import Witnessed
from skerry.run.status import status_of as status_in
from skerry.run.tally import tally
from skerry.shell.signals import Notice
from skerry.store import Store

TOKENS = 10
EMBEDDINGS = ["emb.weight"]


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    """Nothing in the environment says where a syncer is."""
    for name in [name for name in os.environ if name.startswith("SKERRY_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def syncer(tmp_path):
    with Syncer(tmp_path, options=[*OPTIONS, "--learner.leave_timeout_s=60"]) as syncer:
        yield syncer


def learner_of(syncer, tmp_path, **options):
    arrays = arrays_of(tmp_path / "genesis.safetensors")
    options = {"name": "here", "embeddings": EMBEDDINGS} | options
    return arrays, skerry.ArrayLearner(arrays, f"127.0.0.1:{syncer.port}", **options)


def take(learner, arrays, steps):
    for _ in range(steps):
        for array in arrays.values():
            array += 0.01
        learner.step(tokens=TOKENS)


# ---------------------------------------------------------------------------------------------- attaching


def test_a_model_is_of_one_learner_at_a_time(syncer, tmp_path):
    arrays, learner = learner_of(syncer, tmp_path, node="thread")
    other = {"some": np.zeros(3, np.float32), "other": arrays["emb.weight"]}
    with pytest.raises(
        skerry.ModelError, match=r"^emb\.weight is attached to another learner of this process, .*close\("
    ):
        skerry.ArrayLearner(other, f"127.0.0.1:{syncer.port}")
    learner.close()
    with pytest.raises(skerry.RefusedError, match="the model differs"):
        skerry.ArrayLearner(other, f"127.0.0.1:{syncer.port}", name="b", node="thread")
    with skerry.ArrayLearner(arrays, f"127.0.0.1:{syncer.port}", embeddings=EMBEDDINGS, node="thread", wait=False):
        pass  # neither who has left nor who was refused holds anything


# ---------------------------------------------------------------------------------------------- leaving


def seen_of(syncer, name):
    """The life and the state of a learner by the last status, which may be from before it came."""
    one = syncer.status["learners"].get(name, {})
    return one.get("life"), one.get("state")


def test_a_leaving_is_on_the_tape_and_the_next_process_of_the_name_is_no_recovery(syncer, tmp_path):
    for life in (1, 2):
        arrays, learner = learner_of(syncer, tmp_path)
        take(learner, arrays, 37)
        learner.close()
        until(lambda: seen_of(syncer, "here") == (life, "left"), f"life {life} to have left")  # noqa: B023
    syncer.signal(signal.SIGTERM)
    assert syncer.wait() == 0
    assert syncer.said.count("here left in order (37 steps handed over)") == 2
    seen = [(fact.life, fact.what) for fact in facts_of(syncer.run_dir) if isinstance(fact, Witnessed)]
    assert seen == [(1, "stepping"), (1, "left"), (2, "stepping"), (2, "left")]
    with Store.open(syncer.run_dir, readonly=True) as store:
        assert tally(store).learner_restarts == 0
    here = status_in(syncer.run_dir)["learners"]["here"]
    assert (here["state"], here["life"], here["steps"], here["tokens"]) == ("left", 2, 74, 74 * TOKENS)


def test_work_that_was_given_up_is_not_called_handed_over_and_has_its_fate_when_its_learner_has_left(syncer, tmp_path):
    arrays, learner = learner_of(syncer, tmp_path)
    for array in arrays.values():
        array[:] = np.nan
    take(learner, arrays, 1)
    handover = learner.close()
    assert (handover.steps_merged, handover.steps_lost) == (0, 1), handover
    until(lambda: syncer.status["tokens"]["discarded"] == {"fast-forward": TOKENS}, "its fate")
    assert syncer.status["tokens"]["pending"] == 0
    until(
        lambda: "here left in order (1 steps handed over or given up, 0 of 10 tokens merged)" in syncer.said,
        "the word of it",
    )


def test_who_leaves_is_told_what_was_handed_over(syncer, tmp_path):
    arrays, learner = learner_of(syncer, tmp_path)
    assert learner.connected and learner.is_running
    take(learner, arrays, 37)
    assert learner.status().steps == 37
    handover = learner.close()
    assert (handover.steps_merged, handover.steps_lost) == (37, 0), handover
    assert "all that was still open is settled" in handover.reason
    assert learner.close() == handover, "once is enough"
    assert not learner.connected and not learner.status().is_running
    with pytest.raises(RuntimeError, match=r"step\(\) after close\(\): attach the model to another"):
        learner.step(tokens=1)


LOOP = """
import sys, safetensors.numpy, skerry
arrays = {name: array.copy() for name, array in safetensors.numpy.load_file(sys.argv[1]).items()}
with skerry.ArrayLearner(arrays, name="here", embeddings=["emb.weight"], required=True) as learner:
    while True:
        for array in arrays.values():
            array += 0.01
        if not learner.step(tokens=10):
            break
        if learner.status().steps == 37:
            print("stepping", flush=True)
print("not reached: the signal ends the process behind the with")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_loop_that_is_told_to_end_hands_over_what_it_has(syncer, tmp_path, number):
    env = os.environ | {"SKERRY_SYNCER": f"127.0.0.1:{syncer.port}"}
    loop = subprocess.Popen(
        [sys.executable, "-c", LOOP, str(tmp_path / "genesis.safetensors")],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with loop:
        assert loop.stdout.readline() == "stepping\n"
        loop.send_signal(number)
        out, said = loop.communicate(timeout=60)
    assert loop.returncode in ({143} if number == signal.SIGTERM else {130, -signal.SIGINT}) and not out
    assert "steps merged, 0 not: it left, and all that was still open is settled" in said
    until(lambda: syncer.status["learners"].get("here", {}).get("state") == "left", "the syncer to hear that it left")
    tokens = syncer.status["tokens"]
    assert tokens["produced"] == tokens["merged"] >= 37 * TOKENS and not tokens["discarded"]


def test_a_second_signal_and_handlers_of_others_are_left_as_they_are():
    notice = Notice()
    notice.listen()
    signal.raise_signal(signal.SIGINT)
    assert notice.came == signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler, "as it was"
    with pytest.raises(KeyboardInterrupt):
        notice.obey()
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        other = Notice()
        other.listen()
        signal.raise_signal(signal.SIGTERM)
        other.restore()
        assert heard == [signal.SIGTERM] and other.came is None
    finally:
        signal.signal(signal.SIGTERM, before)


def test_sigterm_comes_twice_where_a_scheduler_and_a_launcher_both_pass_it_on():
    notice = Notice()
    notice.listen()
    try:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert notice.came == signal.SIGTERM, "it is the same word, and this process is still here"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        notice.restore()


def test_in_a_fork_and_in_another_thread_signals_mean_what_they_meant():
    notice = Notice()
    notice.listen()
    try:
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGTERM and notice.came is None
    finally:
        notice.restore()
    elsewhere = Notice()
    thread = threading.Thread(target=elsewhere.listen)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_signals_can_be_left_to_the_program(syncer, tmp_path):
    _, learner = learner_of(syncer, tmp_path, on_sigterm=None)
    with learner:
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with pytest.raises(skerry.ConfigError, match=r"on_sigterm = 'stay': give \"leave\", or None"):
        skerry.ArrayLearner({}, on_sigterm="stay")


# ---------------------------------------------------------------------------------------------- alone


def test_a_lost_syncer_is_a_warning_and_so_is_its_return(syncer, tmp_path, caplog):
    arrays, learner = learner_of(syncer, tmp_path)
    take(learner, arrays, 3)
    with caplog.at_level(logging.WARNING):
        syncer.process.kill()
        until(lambda: not learner.connected, "the link to be lost")
        take(learner, arrays, 20)
        assert "is lost: " in caplog.text and learner.is_running
        again = Syncer(tmp_path, "--port", str(syncer.port))
        with again:
            until(lambda: learner.connected, "the syncer to be back")
            until(lambda: learner.is_running and "is back after" in caplog.text, "a line about it")
            handover = learner.close()
    assert (handover.steps_merged, handover.steps_lost) == (23, 0), handover


def test_who_leaves_while_no_syncer_is_there_is_told_what_is_lost(tmp_path):
    with Syncer(tmp_path, options=[*OPTIONS, "--learner.leave_timeout_s=60"]) as syncer:
        arrays, learner = learner_of(syncer, tmp_path, leave_timeout_s=0.2)
        take(learner, arrays, 5)
        syncer.process.kill()
        until(lambda: not learner.connected, "the link to be lost")
        take(learner, arrays, 20)
        assert learner.status().trouble
        handover = learner.close()
    assert handover.steps_lost >= 20 and handover.steps_merged + handover.steps_lost == 25
    assert "(leave_timeout_s)" in handover.reason


# ---------------------------------------------------------------------------------------------- where the syncer is


def test_several_addresses_are_tried_in_turn(syncer, tmp_path):
    arrays = arrays_of(tmp_path / "genesis.safetensors")
    address = f"127.0.0.1:1, nowhere.invalid:7077,127.0.0.1:{syncer.port}"
    with skerry.ArrayLearner(arrays, address, name="here", embeddings=EMBEDDINGS, join_timeout_s=60) as learner:
        assert learner.connected


def test_who_must_have_a_syncer_is_told_that_none_is_named(monkeypatch, caplog):
    arrays = {"w": np.zeros(3, np.float32)}
    with pytest.raises(skerry.ConfigError, match=r"^no syncer: give syncer \(or SKERRY_SYNCER\) = host:port"):
        skerry.ArrayLearner(arrays, required=True)
    with pytest.raises(skerry.ConfigError, match=r"^syncer is given and empty"):
        skerry.ArrayLearner(arrays, "")
    with pytest.raises(
        skerry.ConfigError, match=r'^syncer is a int: give "host:port", or leave it out to train alone$'
    ):
        skerry.ArrayLearner(arrays, 7077)
    with pytest.raises(skerry.ConfigError, match=r"^name is a int: give a string, or leave it out$"):
        skerry.ArrayLearner(arrays, "127.0.0.1:1", name=5)
    with pytest.raises(skerry.ConfigError, match=r"^name is given and empty: give one that stays the same"):
        skerry.ArrayLearner(arrays, "127.0.0.1:1", name="")
    for wrong in ("25", -3, float("nan"), float("inf"), True):
        with pytest.raises(skerry.ConfigError, match=r"^leave_timeout_s = .*: give seconds, 0 or more, or leave it"):
            skerry.ArrayLearner(arrays, "127.0.0.1:1", leave_timeout_s=wrong)
    monkeypatch.setenv("SKERRY_SYNCER", " ")
    with pytest.raises(skerry.ConfigError, match=r"^SKERRY_SYNCER is given and empty"):
        skerry.ArrayLearner(arrays)
    monkeypatch.delenv("SKERRY_SYNCER")
    monkeypatch.setenv("SKERRY_SYNCR", "host:1")
    monkeypatch.setenv("SKERY_SYNCER", "host:1")
    alone = skerry.ArrayLearner(arrays)
    for name in ("SKERRY_SYNCR", "SKERY_SYNCER"):
        assert f"{name} is set in the environment, and nothing reads it: is SKERRY_SYNCER meant?" in caplog.text
    assert alone.step(tokens=1) and alone.is_running and not alone.connected
    assert alone.status().trouble == "no syncer's address was given" and alone.status().steps == 1
    assert alone.close().reason == "there is no syncer: nothing was shared"


WAITS = """
import numpy as np, skerry
learner = skerry.ArrayLearner({"w": np.zeros(3, np.float32)}, "127.0.0.1:1", wait=False)
with learner:
    assert learner.is_running and learner.status().trouble == "it has not joined yet"
    print("waiting", flush=True)
    while learner.step(tokens=1):
        pass
"""


def test_who_waits_at_the_first_step_and_is_told_to_end_ends():
    with subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as loop:
        assert loop.stdout.readline() == b"waiting\n"
        loop.send_signal(signal.SIGTERM)
        assert loop.wait(60) == 143


def test_who_does_not_wait_in_the_constructor_waits_at_the_first_step(syncer, tmp_path):
    arrays, learner = learner_of(syncer, tmp_path, wait=False)
    learner.wait_for_start()
    learner.wait_for_start()
    take(learner, arrays, 2)
    assert learner.close().steps_merged == 2
    arrays, other = learner_of(syncer, tmp_path, wait=False, name="other")
    take(other, arrays, 1)
    assert other.close().steps_merged == 1
