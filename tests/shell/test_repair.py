"""A run whose newest versions cannot be had: refused, then made whole, and it goes on; real files and processes."""

import itertools
import logging
import shutil
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from e2e.processes import OPTIONS, SHAPES, Puppet, Syncer, facts_of, secret, skerry, until
from node.pair import NumpyParameters, Pair, config_of
from skerry.algo.fragments import Tensor, decode_layout, encode_layout, layout_of
from skerry.core.audit import Audit
from skerry.core.events import Interrupted
from skerry.core.facts import Committed, EpochStarted, LifeStarted, Restored, SteppedBack
from skerry.core.messages import PROTOCOL, FragmentPosition, Hello, Lend, Lent, Report
from skerry.core.state import state_of
from skerry.errors import FileDamaged, NoAnswer
from skerry.node import versions
from skerry.node.algebra import FLOAT32
from skerry.node.training import ByHand
from skerry.run import summary
from skerry.run.backup import back_up
from skerry.run.facts import fragments_of
from skerry.run.genesis import GENESIS, GenesisFile
from skerry.run.keys import Keys
from skerry.run.prune import carry_out, choose
from skerry.run.repair import damaged, explain, reach, take_copy
from skerry.run.replay import replay
from skerry.run.restore import restore
from skerry.run.tally import tally
from skerry.shell.identity import tls_of
from skerry.shell.learner import LearnerShell
from skerry.shell.repair import Lenders, make_whole
from skerry.store import Store
from skerry.store.journal import Place
from skerry.wire import frames
from skerry.wire.client import Client
from skerry.wire.connection import Outgoing
from skerry.wire.inquiry import ask_status
from skerry.wire.transport import Inbox, Opened, Received

WAIT_S = 60.0
# an outer state that is not zero, so that what is lost of it shows
STATEFUL = {
    "outer": {"rule": "nesterov", "lr": 0.7, "momentum": 0.9},
    "wire": {"codec_up": "int8", "codec_down": "int4"},
}


def state_in(run_dir):
    with Store.open(run_dir, readonly=True) as store:
        return state_of(store.records)


def checkpoints(run_dir):
    """The files of every fragment, that of the start first and the newest last."""
    state = state_in(run_dir)
    found = [
        dict.fromkeys([file, *(c.file for c in at.checkpoints)])
        for file, at in zip(state.created.files, state.fragments, strict=True)
    ]
    return [[run_dir / "files" / file for file in files] for files in found]


def flip(path, at=None):
    data = bytearray(path.read_bytes())
    data[len(data) // 3 if at is None else at] ^= 1
    path.write_bytes(data)


def damage_all(run_dir):
    """No checkpoint is left: one has a byte flipped, one is gone, and so on in turn."""
    for path, index in zip([path for paths in checkpoints(run_dir) for path in paths], itertools.count()):
        if index % 2:
            path.unlink()
        else:
            flip(path)


def rot_entries(run_dir, redone):
    for redo in redone:
        at = Place(*redo.entry)
        flip(run_dir / "journal" / f"{at.file:06d}.log", at.offset + at.size // 2)


def damage_newest(run_dir, p):
    """The newest version cannot be had, and the one before it can."""
    at = state_in(run_dir).fragments[p]
    rot_entries(run_dir, at.redo[-1:])
    for checkpoint in at.checkpoints:
        if checkpoint.version == at.version:
            flip(run_dir / "files" / checkpoint.file)


def values_in(run_dir):
    """The newest of every fragment; the tape has digests of them, which are held against what is had."""
    with Store.open(run_dir, readonly=True) as store:
        state = state_of(store.records)
        found = versions.newest(store, state, fragments_of(state.created))
    assert [FLOAT32.digest(values.theta) for values in found] == [at.digest for at in state.fragments]
    assert [FLOAT32.state_digest(values) for values in found] == [at.state for at in state.fragments]
    return found


def is_in_order(run_dir):
    """The whole tape can be read and every fact on it may be."""
    audit = Audit()
    for fact in facts_of(run_dir):
        audit.take(fact)
    assert audit.violations == []
    return True


def restored_in(run_dir):
    return [fact for fact in facts_of(run_dir) if isinstance(fact, Restored)]


class Training:
    """A real learner in this process: it steps while it is let, and only its own thread passes boundaries."""

    def __init__(self, port):
        layout = layout_of(Tensor(n, s, "embedding" if "emb" in n else "other") for n, s in SHAPES.items())
        self.parameters = NumpyParameters()
        self.shell = LearnerShell("island", layout, ByHand(self.parameters), "127.0.0.1", port, None)
        self.may_step, self.rests, self.end = threading.Event(), threading.Event(), threading.Event()
        self.may_step.set()
        self.steps = 0
        self.thread = threading.Thread(target=self._train)
        self.thread.start()

    @property
    def machine(self):
        return self.shell.beside.loop.driver.node.machine

    def _train(self):
        self.shell.start(WAIT_S)
        while not self.end.wait(0.01):
            if not self.may_step.is_set():
                until(lambda: self.machine.step_count == self.steps, "the node to hear of every boundary")
                self.rests.set()
                self.may_step.wait()
            for values in self.parameters.values.values():
                values += np.float32(1e-3)
            self.shell.step(10)
            self.steps += 1
        self.shell.close(timeout_s=0.0)

    def rest(self, run_dir):
        """Take no step; returns when it holds every newest version and no further one can come."""
        self.rests.clear()
        self.may_step.clear()
        assert self.rests.wait(WAIT_S)
        positions = self.machine.positions

        def is_quiet():
            versions = [at.version for at in state_in(run_dir).fragments]
            return not any(p.outstanding for p in positions) and [p.base_version for p in positions] == versions

        until(is_quiet, "the learner to hold every newest version")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end.set()
        self.may_step.set()
        self.thread.join(WAIT_S)


def test_a_learner_that_holds_the_versions_repairs_the_run_and_it_goes_on(tmp_path):
    run_dir = tmp_path / "run"
    with Syncer(tmp_path) as syncer, Training(syncer.port) as learner:
        until(lambda: min(at.version for at in state_in(run_dir).fragments) >= 2, "two versions of each fragment")
        learner.rest(run_dir)
        syncer.signal(signal.SIGTERM)  # what ends in order has a checkpoint of everything
        assert syncer.wait() == 0
        before = state_in(run_dir)
        names = [paths[-1] for paths in checkpoints(run_dir)]
        for path in itertools.chain(*checkpoints(run_dir)):
            flip(path)

        refused = skerry("syncer", "--run", run_dir, "--port", syncer.port, "--json")
        assert refused.returncode == 2
        (line,) = [line for line in refused.stderr.splitlines() if line.startswith("skerry: ")]
        version = before.fragments[0].version
        assert line.startswith(f"skerry: fragment 0 version {version} (and 1 more): {names[0]} differs from what was")
        assert line.endswith(f", or skerry syncer --run {run_dir} --repair (the same version, from a learner)")

        with Syncer(tmp_path, "--port", syncer.port, "--repair") as again:
            restored = restored_in(run_dir)
            learner.may_step.set()
            until(lambda: again.status["merges"] >= before.merges + 4, "merges after the repair")
            learner.rest(run_dir)
            again.signal(signal.SIGKILL)
            again.wait()

        damage_newest(run_dir, 1)
        lost = state_in(run_dir)
        with Syncer(tmp_path, "--port", syncer.port, "--repair", "previous") as last:
            learner.may_step.set()
            until(lambda: last.status["merges"] >= lost.merges + 5, "merges from the version before")
            last.signal(signal.SIGTERM)
            assert last.wait() == 0
        assert learner.machine.discards == [], "it was never made to give work up"

    assert restored_in(run_dir) == restored and sorted(fact.fragment for fact in restored) == [0, 1]
    for fact in restored:
        at = before.fragments[fact.fragment]
        assert (fact.version, fact.digest) == (at.version, at.digest)
        assert fact.source == "island; velocity and residual lost"
    (back,) = [fact for fact in facts_of(run_dir) if isinstance(fact, SteppedBack)]
    newest = lost.fragments[1].version
    assert (back.fragment, back.version, back.to) == (1, newest + 1, newest - 1)
    assert f"from version {newest - 1}: version {newest} could not be had, what was merged since is lost" in last.said
    assert [fact.life for fact in facts_of(run_dir) if isinstance(fact, LifeStarted)] == [1]
    assert is_in_order(run_dir)


def test_recorded_contributions_give_the_same_bytes_without_any_learner_again_and_again(tmp_path):
    run_dir = tmp_path / "run"
    options = [*OPTIONS, "--store.record=full", "--wire.codec_up=fp32", "--wire.codec_down=int4"]
    with Syncer(tmp_path, options=options) as syncer:
        with Puppet(syncer.port) as puppet:
            while min(puppet.base) < 2:
                puppet.merge_once()
        syncer.signal(signal.SIGKILL)
        syncer.wait()
    for times in (1, 2):
        before, values = state_in(run_dir), values_in(run_dir)
        rot_entries(run_dir, [redo for at in before.fragments for redo in at.redo])
        with Syncer(tmp_path, "--repair") as again:
            assert [fact.fragment for fact in restored_in(run_dir)] == [0, 1] * times
            assert all(np.array_equal(a, b) for old, new in zip(values, values_in(run_dir), strict=True)
                       for a, b in zip(old, new, strict=True))  # fmt: skip
            assert [at.state for at in state_in(run_dir).fragments] == [at.state for at in before.fragments]
            with Puppet(again.port) as puppet:
                while min(puppet.base) < max(at.version for at in before.fragments) + 2:
                    puppet.merge_once()
            again.signal(signal.SIGKILL)
            again.wait()
    assert all(fact.source.endswith("and the recorded merges since") for fact in restored_in(run_dir))
    with Store.open(run_dir, readonly=True) as store:
        assert replay(store).identical


# ---------------------------------------------------------------------------------------------- without processes


@pytest.fixture
def killed(tmp_path):
    """A run of three fragments, a few versions in, with a learner that holds the newest of each; its store is shut."""
    with Pair(tmp_path / "run", config_of(**STATEFUL)) as pair:
        a = pair.join("a")
        pair.until(lambda: min(pair.versions) >= 3 and pair.is_current(a) and not a.node.outstanding)
        pair.store.close()
        yield pair


@pytest.fixture
def pair(killed):
    """The same, ended in order: every newest version has a checkpoint."""
    killed.restart()
    killed.syncer.handle(Interrupted(), killed.now)
    killed.syncer.look(killed.now)
    assert killed.syncer.finished == "interrupted"
    killed.store.close()
    return killed


def repair(pair, previous=False, keep_going=lambda: False, port=0):
    with Store.open(pair.root) as store:
        return make_whole(store, ("127.0.0.1", port, None), previous, keep_going)


@dataclass
class Lender:
    """A learner by hand, for one connection: it answers what it is asked with what a test gave it."""

    pair: Pair
    port: int
    name: str
    copies: dict  # fragment -> values
    key_file: str | None = None

    def __post_init__(self):
        self.inbox = Inbox()
        self.client = Client("127.0.0.1", self.port, None, self.inbox, lambda _: 0, tls=tls_of(self.key_file))
        self.peer = self._hear(Opened).peer
        layout = self.pair.layout
        self.client.send(self.peer, Hello(PROTOCOL, self.name, "p", 1, msgspec.json.encode(layout), layout.digest))
        self.asked = [self._hear(Lend) for _ in self.copies]

    def lend(self):
        for ask in self.asked:
            values = self.copies[ask.fragment]
            lent = Lent(
                self.name, ask.fragment, ask.version, self.pair.syncer.machine.state.fragments[ask.fragment].digest
            )
            self.client.send(self.peer, lent, values.tobytes())

    def lend_half(self):
        """Announce a copy and hang up before its bytes."""
        ask = self.asked[0]
        whole = self.copies[ask.fragment].tobytes()
        lent = Lent(self.name, ask.fragment, ask.version, b"")
        announced = [next(frames.encode_bulk(1, lent, memoryview(whole)))]
        self.client._loop.call(self.client._enqueue, self.peer, Outgoing(iter(announced), 1, "out"), True)
        until(lambda: not self.inbox.empty(), "the announcement to leave")
        self.client.close()

    def _hear(self, kind):
        while True:
            event = self.inbox.get(timeout=WAIT_S)
            heard = event.message if isinstance(event, Received) else event
            if isinstance(heard, kind):
                return heard


def test_a_wrong_copy_is_refused_and_a_vanished_lender_does_no_harm(pair):
    before = state_in(pair.root)
    damage_all(pair.root)
    bases = dict(enumerate(pair.loops["a"].node.bases))
    clients = []
    with Store.open(pair.root) as store:
        state = state_of(store.records)
        lenders = Lenders(store, state, damaged(store, state), ("127.0.0.1", 0, None))

        def serve():
            liar = Lender(pair, lenders.server.port, "liar", {p: base + 1 for p, base in bases.items()})
            liar.lend()
            until(lambda: lenders.refused == 3, "three wrong copies to be refused")
            Lender(pair, lenders.server.port, "half", bases).lend_half()
            until(lambda: "half" not in lenders.learners.values(), "the vanished lender to be forgotten")
            honest = Lender(pair, lenders.server.port, "honest", bases)
            honest.lend()
            clients.extend([liar.client, honest.client])

        others = threading.Thread(target=serve)
        others.start()
        deadline = time.monotonic() + WAIT_S
        assert lenders.wait(lambda: time.monotonic() < deadline)
        others.join(WAIT_S)
    for client in clients:
        client.close()
    assert values_in(pair.root) and is_in_order(pair.root)
    assert [f.source.split(";")[0] for f in restored_in(pair.root)] == ["honest"] * 3
    after = state_in(pair.root)
    assert [(at.version, at.digest) for at in after.fragments] == [(at.version, at.digest) for at in before.fragments]
    assert [[c.version for c in at.checkpoints] for at in after.fragments] == [[at.version] for at in before.fragments]


def test_a_run_with_keys_borrows_only_from_who_has_one_and_by_its_name(pair, tmp_path):
    damage_all(pair.root)
    keys, bases = Keys(pair.root), dict(enumerate(pair.loops["a"].node.bases))
    a_key = str(secret(tmp_path / "a.key", keys.issue("a").pem.decode()))
    with Store.open(pair.root) as store:
        state = state_of(store.records)
        lenders = Lenders(store, state, damaged(store, state), ("127.0.0.1", 0, None), keys)
        clients = []

        def serve():
            clients.append(Lender(pair, lenders.server.port, "b", {}, a_key).client)  # in another's name: is not asked
            with pytest.raises(NoAnswer, match="name a key file"):
                ask_status("127.0.0.1", lenders.server.port, None, within_s=WAIT_S)
            honest = Lender(pair, lenders.server.port, "a", bases, a_key)
            honest.lend()
            clients.append(honest.client)

        others = threading.Thread(target=serve)
        others.start()
        deadline = time.monotonic() + WAIT_S
        assert lenders.wait(lambda: time.monotonic() < deadline)
        others.join(WAIT_S)
    for client in clients:
        client.close()
    assert values_in(pair.root) and [f.source.split(";")[0] for f in restored_in(pair.root)] == ["a"] * 3


def test_who_lends_what_it_was_not_asked_for_is_hung_up_on_and_the_run_is_repaired(pair):
    """Again and again the same wrong copy, a second hello, and messages of every other kind: each costs the link."""
    damage_all(pair.root)
    bases = dict(enumerate(pair.loops["a"].node.bases))
    wrong = {p: base * np.float32("nan") for p, base in bases.items()}
    clients = []
    with Store.open(pair.root) as store:
        state = state_of(store.records)
        lenders = Lenders(store, state, damaged(store, state), ("127.0.0.1", 0, None))

        def serve():
            for kind in range(4):
                hostile = Lender(pair, lenders.server.port, f"hostile-{kind}", wrong)
                clients.append(hostile)
                if kind == 0:
                    for _ in range(4):
                        hostile.lend()
                elif kind == 1:
                    for _ in range(2):
                        layout = encode_layout(pair.layout)
                        hello = Hello(PROTOCOL, hostile.name, "p", 0, layout, pair.layout.digest)
                        hostile.client.send(hostile.peer, hello)
                elif kind == 2:
                    lent = Lent(hostile.name, 2**40, 0, b"")
                    hostile.client.send(hostile.peer, lent, b"xxxx")
                else:
                    position = (FragmentPosition(0, 0, 0, 0),)
                    for _ in range(50):
                        report = Report(hostile.name, 1, 1, 0, 0, 0.0, "training", position)
                        hostile.client.send(hostile.peer, report)
                    hostile.client.close()
                until(lambda k=kind: f"hostile-{k}" not in lenders.learners.values(), f"hostile {kind} to be gone")
            honest = Lender(pair, lenders.server.port, "honest", bases)
            clients.append(honest)
            honest.lend()

        helper = threading.Thread(target=serve, daemon=True)
        helper.start()
        assert lenders.wait(lambda: True)
        helper.join(WAIT_S)
    for each in clients:
        each.client.close()
    assert lenders.refused == len(bases), "each fragment's copy is looked at once"
    values_in(pair.root)
    is_in_order(pair.root)


def test_a_copy_has_neither_velocity_nor_residual(pair):
    state, fragment = state_in(pair.root), pair.fragments[1]
    assert np.any(pair.syncer.values[1].velocity) and np.any(pair.syncer.values[1].error), "there is something to lose"
    for path in checkpoints(pair.root)[1]:
        path.unlink()
    with Store.open(pair.root) as store:
        (damage,) = damaged(store, state)
        base = pair.loops["a"].node.bases[1]
        assert take_copy(store, damage, "a", memoryview((base + 1).tobytes())) is None
        fact = take_copy(store, damage, "a", memoryview(base.tobytes()))
        values = FLOAT32.load(store.get(fact.file), fragment)
    assert np.array_equal(values.theta, pair.syncer.values[1].theta)
    assert not np.any(values.velocity) and not np.any(values.error)
    assert fact.source == "a; velocity and residual lost" and fact.state == FLOAT32.state_digest(values)


def test_a_genesis_is_lent_whole(tmp_path):
    with Pair(tmp_path / "run", config_of()) as pair:
        pass
    state = state_in(pair.root)
    for path in checkpoints(pair.root)[1]:
        path.unlink()
    with Store.open(pair.root) as store:
        (damage,) = damaged(store, state)
        fact = take_copy(store, damage, "a", memoryview(pair.genesis[1].tobytes()))
    assert (fact.source, fact.state) == ("a", state.fragments[1].state), "it is all that was lost"


def test_a_version_without_a_checkpoint_is_borrowed_from_nobody(killed):
    """The tape has a quick hash of it, and no sha256: a learner would have to be believed."""
    before = state_in(killed.root)
    assert before.fragments[1].checkpoints[-1].version < before.fragments[1].version
    damage_newest(killed.root, 1)
    version = before.fragments[1].version
    said = (
        rf"no sha256 to check a learner's copy by: fragment 1 version {version}: .*/journal/\d+\.log at byte \d+: .*, "
        rf"or skerry syncer --run {killed.root} --repair previous \(this fragment from version {version - 1}\)$"
    )
    with pytest.raises(FileDamaged, match=said):
        repair(killed)
    assert state_in(killed.root) == before


def test_previous_goes_on_from_the_newest_that_can_be_had_as_a_new_version(killed, caplog):
    pair, before = killed, state_in(killed.root)
    damage_newest(pair.root, 0)
    rot_entries(pair.root, before.fragments[1].redo[1:])  # the first after its genesis, and nothing since
    with Store.open(pair.root, readonly=True) as store:
        about = zip(pair.fragments, before.fragments, strict=True)
        last = [reach(store, before, fragment, at.version).version for fragment, at in about]
        assert last == [before.fragments[0].version - 1, 1, before.fragments[2].version]
        old = [
            versions.load(store, f, at, version=version)
            for f, at, version in zip(pair.fragments, before.fragments, last, strict=True)
        ]
    assert repair(pair, previous=True)

    after = state_in(pair.root)
    backs = [fact for fact in facts_of(pair.root) if isinstance(fact, SteppedBack)]
    assert [(back.fragment, back.to) for back in backs] == [(0, last[0]), (1, 1)]
    assert after.fragments[2] == before.fragments[2]
    for back, was in zip(backs, before.fragments, strict=False):
        assert (back.version, back.parent) == (was.version + 1, was.digest)
        lost = f"version {was.version} could not be had, what was merged since is lost"
        assert f"restored from version {back.to}: {lost}" in caplog.text
    assert after.ledger == before.ledger

    pair.restart()
    a = pair.loops["a"]
    pair.until(lambda: pair.is_current(a))
    for p in (0, 1):
        assert np.array_equal(a.node.bases[p], old[p].theta)
    assert a.machine.discards == [], "its own work goes on from there"
    pair.until(lambda: min(pair.versions) > max(at.version for at in after.fragments) + 2)
    t = tally(pair.store)
    status = {"learners": {}, "refused": {}}
    assert summary.summarise(t, status, [], {})["versions"] == pair.versions
    assert is_in_order(pair.root)


def test_previous_is_all_or_nothing(killed):
    before = state_in(killed.root)
    for p in (0, 1):
        damage_newest(killed.root, p)
    for path in checkpoints(killed.root)[2]:
        path.unlink()
    said = r"^no earlier version can be had: fragment 2 version \d+: .* is missing: restore it from a copy$"
    with pytest.raises(FileDamaged, match=said):
        repair(killed, previous=True)
    assert state_in(killed.root) == before


def test_damage_to_what_nobody_goes_on_from_stops_nothing(pair):
    """Everything but the newest checkpoints: older ones, and the whole journal."""
    newest = {paths[-1] for paths in checkpoints(pair.root)}
    old = [path for path in (pair.root / "files").iterdir() if path not in newest]
    assert len(old) >= 3
    for path in old:
        flip(path)
    for path in (pair.root / "journal").iterdir():
        path.unlink()
    pair.restart()
    a, versions_before = pair.loops["a"], pair.versions
    pair.until(lambda: min(pair.versions) > max(versions_before) and pair.is_current(a))


@pytest.mark.parametrize("look", [repair, Pair.restart])
def test_a_rotten_checkpoint_with_a_good_one_before_it_is_written_anew_at_the_first_look(pair, caplog, look):
    values, facts, newest = values_in(pair.root), facts_of(pair.root), [paths[-1] for paths in checkpoints(pair.root)]
    whole = [path.read_bytes() for path in newest]
    for path in newest:
        flip(path)
    look(pair)
    assert [path.read_bytes() for path in newest] == whole
    for path in newest:
        assert f"{path} was damaged and is written anew" in caplog.text
    caplog.clear()
    assert [fact for fact in facts_of(pair.root) if not isinstance(fact, EpochStarted)] == [
        fact for fact in facts if not isinstance(fact, EpochStarted)
    ], "the tape need not hear of it"
    pair.store.close()
    pair.restart()
    assert caplog.messages == [] and all(
        np.array_equal(a, b)
        for old, new in zip(values, pair.syncer.values, strict=True)
        for a, b in zip(old, new, strict=True)
    )


def folder_in_place(path):
    path.unlink()
    path.mkdir()
    (path / "what").write_text("somebody put here")


def link_in_place(path):
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


@pytest.mark.parametrize("look", [repair, Pair.restart])
@pytest.mark.parametrize("spoil", [folder_in_place, link_in_place])
def test_a_checkpoint_that_cannot_be_read_is_as_good_as_rotten(pair, look, spoil):
    newest = [paths[-1] for paths in checkpoints(pair.root)]
    whole = [path.read_bytes() for path in newest]
    for path in newest:
        spoil(path)
    look(pair)
    assert [path.read_bytes() for path in newest] == whole and not any(path.is_symlink() for path in newest)
    pair.store.close()
    pair.restart()
    versions_before = pair.versions
    pair.until(lambda: min(pair.versions) > max(versions_before))


def test_a_journal_that_cannot_be_read_is_as_good_as_rotten(killed):
    """What it led to can be had no more, what lies before it can; the folder in its place is left where it is."""
    before = state_in(killed.root)
    for path in (killed.root / "journal").iterdir():
        folder_in_place(path)
    with pytest.raises(FileDamaged, match=r"the file cannot be read \(Is a directory\): restore it from a copy"):
        values_in(killed.root)
    assert repair(killed, previous=True)
    killed.restart()
    killed.until(lambda: min(killed.versions) > max(at.version for at in before.fragments) + 1)


def test_without_a_checkpoint_a_version_is_done_again_from_the_start_and_the_journal(pair):
    """As far as the journal goes back: without recorded contributions too."""
    values = values_in(pair.root)
    for paths in checkpoints(pair.root):
        for path in paths[1:]:
            flip(path)
    assert repair(pair)
    assert all(np.array_equal(a, b) for old, new in zip(values, values_in(pair.root), strict=True)
               for a, b in zip(old, new, strict=True))  # fmt: skip


def test_a_repair_with_nothing_to_do_writes_nothing(pair):
    facts = facts_of(pair.root)
    assert repair(pair)
    assert facts_of(pair.root) == facts


def test_a_wait_that_is_broken_off_changes_nothing(pair):
    before = state_in(pair.root)
    for path in checkpoints(pair.root)[0]:
        flip(path)
    assert not repair(pair)
    assert state_in(pair.root) == before


# ---------------------------------------------------------------------------------------------- every kind of file


@pytest.fixture(params=["decisions", "full"])
def long(tmp_path, request):
    """A run that has kept versions and let go of its first checkpoints and journal, ended in order; its tape has two
    segments, and beside it lies the file that it began from."""
    store = {"keep_every": 4, "checkpoint_every": 2, "record": request.param}
    with Pair(tmp_path / "run", config_of(store=store, **STATEFUL)) as pair:
        pair.join("a")
        pair.store.journal.file_bytes = 1
        pair.until(lambda: len(pair.syncer.machine.state.kept) >= 2 and min(pair.versions) >= 12)
        state = pair.syncer.machine.state
        pair.store.rotate(msgspec.msgpack.encode(state))
        pair.store.collect(state.files, state.journal)
        pair.syncer.handle(Interrupted(), pair.now)
        pair.syncer.look(pair.now)
        pair.store.close()
        save_file({name: np.asarray(array) for name, array in pair.arrays.items()}, pair.root / GENESIS)
        yield pair


def is_recorded(pair):
    return pair.syncer.config.store.record == "full"


def damaged_and_repaired(pair, path, caplog):
    """Whether the file is as it was before a byte of it was flipped."""
    whole = path.read_bytes()
    flip(path)
    caplog.clear()
    with Store.open(pair.root) as store:
        assert make_whole(store, ("127.0.0.1", 0, None), False, lambda: False, pair.root / GENESIS)
    assert str(path) in caplog.text
    return path.read_bytes() == whole


def test_a_rotten_start_is_had_from_the_file_that_the_run_began_from(long, caplog):
    path = long.root / "files" / state_in(long.root).created.files[1]
    assert damaged_and_repaired(long, path, caplog)
    (long.root / GENESIS).unlink()
    assert not damaged_and_repaired(long, path, caplog)
    assert f"repair: the start, fragment 1: {path} differs from what was written: restore it from a copy" in caplog.text


def test_where_all_files_are_gone_the_run_is_had_from_what_it_began_from_and_its_journal(pair):
    values, before = values_in(pair.root), state_in(pair.root)
    shutil.rmtree(pair.root / "files")
    ways = []
    for path in (pair.root / GENESIS, pair.root.parent / "mine"):
        save_file({name: np.asarray(array) for name, array in pair.arrays.items()}, path)
        with Store.open(pair.root, readonly=True) as store:
            found = damaged(store, before)
            ways.append(explain(store, before, found, genesis=path if path.name == "mine" else None).split(", or ")[1:])
    serve = f"skerry syncer --run {pair.root}"
    assert ways == [
        [f"{serve} --repair (the same version, from records)"],
        [f"{serve} --genesis {path} --repair (the same version, from records)"],
    ]
    with Store.open(pair.root) as store:
        assert make_whole(store, ("127.0.0.1", 0, None), False, lambda: False, path)
    assert all(np.array_equal(a, b) for old, new in zip(values, values_in(pair.root), strict=True)
               for a, b in zip(old, new, strict=True))  # fmt: skip


def test_the_file_that_the_run_began_from_is_read_once_however_many_fragments_are_rotten(long, monkeypatch):
    read, values = [], GenesisFile._values

    def noting(file, name, start, count):
        read.append(count)
        return values(file, name, start, count)

    monkeypatch.setattr(GenesisFile, "_values", noting)
    created = state_in(long.root).created
    for file in created.files:
        flip(long.root / "files" / file)
    with Store.open(long.root) as store:
        assert make_whole(store, ("127.0.0.1", 0, None), False, lambda: False, long.root / GENESIS)
    assert len(created.files) > 1 and sum(read) == decode_layout(created.layout).param_count


def test_a_rotten_kept_version_is_had_from_recorded_contributions(long, caplog):
    version = state_in(long.root).kept[0]
    path = long.root / "files" / version.checkpoints[2].file
    assert damaged_and_repaired(long, path, caplog) == is_recorded(long)
    if not is_recorded(long):
        assert f"repair: kept version {version.number}, fragment 2: {path} differs" in caplog.text


def test_two_rotten_checkpoints_are_had_from_recorded_contributions_or_named_with_the_way_out(long, caplog):
    at = state_in(long.root).fragments[0]
    kept = {version.checkpoints[0].file for version in state_in(long.root).kept}
    paths = [long.root / "files" / c.file for c in at.checkpoints]
    values = values_in(long.root)
    for path in paths:
        flip(path)
    with Store.open(long.root) as store:
        state = state_of(store.records)
        line = explain(store, state, damaged(store, state))
    assert line.startswith(f"fragment 0 version {at.version}: {paths[-1]} differs from what was written")
    if is_recorded(long):
        assert line.endswith(f"or skerry syncer --run {long.root} --repair (the same version, from records)")
        assert repair(long)
        assert all(np.array_equal(a, b) for old, new in zip(values, values_in(long.root), strict=True)
                   for a, b in zip(old, new, strict=True))  # fmt: skip
    else:
        last = max(c.version for c in checkpoints_kept(long.root, 0) if c.file in kept and c not in at.checkpoints)
        assert f"--repair previous (this fragment from version {last})" in line
        assert repair(long, previous=True)
        assert state_in(long.root).fragments[0].version == at.version + 1


def checkpoints_kept(run_dir, p):
    return [version.checkpoints[p] for version in state_in(run_dir).kept]


@pytest.fixture(params=["killed", "paused", "closed"])
def ended(tmp_path, request):
    """A run of many versions that nobody serves; but for a killed one all the newest have a checkpoint."""
    is_closed = request.param == "closed"
    config = config_of(steps=60 if is_closed else 600, store={"checkpoint_every": 3}, **STATEFUL)
    with Pair(tmp_path / "run", config) as pair:
        pair.join("a")
        pair.until(lambda: pair.syncer.finished if is_closed else min(pair.versions) >= 10)
        if request.param == "paused":
            pair.syncer.handle(Interrupted(), pair.now)
            pair.syncer.look(pair.now)
        pair.store.close()
        assert state_in(pair.root).phase == ("closed" if is_closed else "training")
        yield pair


def is_made_whole(pair, p, caplog):
    """A backup is refused until the run has been repaired, which costs no value and happens once."""
    caplog.set_level(logging.INFO)
    before, values = state_in(pair.root), values_in(pair.root)
    with pytest.raises(FileDamaged, match=rf"^{pair.root}/.*skerry syncer --run {pair.root} --repair$"):
        back_up(pair.root, pair.root.parent / "backups", 1.0)
    assert repair(pair)
    after, at = state_in(pair.root), before.fragments[p]
    assert f"fragment {p} version {at.version}: what is damaged before it is needed no more" in caplog.text
    assert [c.version for c in after.fragments[p].checkpoints] == [at.version] and not after.fragments[p].redo
    assert [(f.version, f.digest, f.state) for f in after.fragments] == [
        (f.version, f.digest, f.state) for f in before.fragments
    ]
    back_up(pair.root, pair.root.parent / "backups", 2.0)
    restore(pair.root.parent / "backups", pair.root.parent / "again")
    again = values_in(pair.root.parent / "again")
    assert all(np.array_equal(a, b) for old, new in zip(values, again, strict=True)
               for a, b in zip(old, new, strict=True))  # fmt: skip
    facts = facts_of(pair.root)
    assert repair(pair) and facts_of(pair.root) == facts and is_in_order(pair.root)
    return True


def test_a_rotten_entry_that_the_newest_version_does_not_need_is_left_behind(ended, caplog):
    at = state_in(ended.root).fragments[1]
    rotten = next(redo for redo in at.redo if redo.version > at.checkpoints[-2].version)
    assert rotten.version <= at.checkpoints[-1].version <= at.version
    rot_entries(ended.root, [rotten])
    entry = Place(*rotten.entry)
    where = f"{ended.root}/journal/{entry.file:06d}.log at byte {entry.offset}: {entry.size} bytes are not what was"
    with pytest.raises(FileDamaged, match=where):
        back_up(ended.root, ended.root.parent / "backups", 1.0)
    assert is_made_whole(ended, 1, caplog)


def test_a_rotten_checkpoint_that_nothing_leads_to_is_left_behind(ended, caplog):
    first = state_in(ended.root).fragments[2].checkpoints[0]
    merged = [fact for fact in facts_of(ended.root) if isinstance(fact, Committed) and fact.decision.fragment == 2]
    rot_entries(ended.root, [fact.result for fact in merged if fact.decision.version == first.version])
    flip(ended.root / "files" / first.file)
    assert is_made_whole(ended, 2, caplog)


def test_what_was_left_behind_is_recomputed_from_the_record(long):
    at = state_in(long.root).fragments[0]
    rot_entries(long.root, [redo for redo in at.redo if redo.version > at.checkpoints[-2].version][:1])
    assert repair(long) and [fact.fragment for fact in restored_in(long.root)] == [0]
    with Store.open(long.root, readonly=True) as store:
        assert replay(store).agrees


def test_a_run_that_was_paused_goes_on_after_a_rotten_entry_was_left_behind(pair):
    at = state_in(pair.root).fragments[0]
    rot_entries(pair.root, at.redo[:1])
    assert repair(pair)
    pair.restart()
    a, versions_before = pair.loops["a"], pair.versions
    pair.until(lambda: min(pair.versions) > max(versions_before) and pair.is_current(a))
    assert a.machine.discards == [] and is_in_order(pair.root)


def test_a_rotten_kept_version_that_nothing_gives_again_is_let_go_of_and_the_run_is_backed_up(long, tmp_path):
    if is_recorded(long):
        return  # it is had from them
    state = state_in(long.root)
    held = {c.file for at in state.fragments for c in at.checkpoints}
    flip(next(long.root / "files" / c.file for c in state.kept[0].checkpoints if c.file not in held))
    assert repair(long)
    with pytest.raises(FileDamaged, match="differs from what was written: a backup has to be whole"):
        back_up(long.root, tmp_path / "backups", 1.0)
    with Store.open(long.root) as store:
        carry_out(store, state, choose(store, state, 1e9, kept=len(state.kept) - 1))
    back_up(long.root, tmp_path / "backups", 2.0)


def test_lost_contributions_are_named_with_what_that_costs_and_the_run_goes_on(long, caplog):
    caplog.set_level(logging.INFO)
    if not is_recorded(long):
        assert not list((long.root / "record").iterdir())
        return
    merges = [fact for fact in facts_of(long.root) if isinstance(fact, Committed)]
    for fact, spoil in zip(merges[4:7], (flip, Path.unlink, folder_in_place), strict=True):
        spoil(long.root / "record" / fact.result.payloads)
    facts = facts_of(long.root)
    assert repair(long) and facts_of(long.root) == facts
    lines = [line for line in caplog.messages if line.startswith("repair: ")]
    for line, fact, why in zip(lines[:3], merges[4:7], ("differs from", "is missing", "cannot be read"), strict=True):
        where = f"fragment {fact.decision.fragment} version {fact.decision.version}"
        assert line.startswith(f"repair: record, {where}: {long.root}/record/{fact.result.payloads} {why}")
        assert line.endswith("nobody else has it; the run goes on without it, a replay that comes to it stops")
    assert lines[3:] == ["repair: the newest version of every fragment can be had; what is damaged is named above"]
    for fact in merges[7:27]:
        (long.root / "record" / fact.result.payloads).unlink()
    caplog.clear()
    assert repair(long)
    assert caplog.text.count("repair: record, ") == 10 and "so are 13 more of the recorded contributions" in caplog.text


@pytest.mark.parametrize(
    ("spoil", "says"), [(flip, "is damaged from record"), (folder_in_place, "cannot be read (Is a")]
)
def test_a_rotten_segment_of_the_tape_is_named_and_the_run_goes_on(long, caplog, spoil, says):
    spoil(long.root / "tape" / "000001.seg")
    assert repair(long)
    (line,) = [line for line in caplog.messages if line.startswith("repair: tape: ")]
    assert f"{long.root}/tape/000001.seg {says}" in line
    assert "restore it from a copy; the run goes on without it, replay cannot" in line
