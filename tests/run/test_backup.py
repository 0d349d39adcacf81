"""Backups: whole or not there, of a run that goes on meanwhile; and what a restore makes of them."""

import fcntl
import json
import os
import signal
import stat

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from cli.called import called
from e2e.processes import write_genesis
from node.pair import Pair, config_of
from skerry.core.events import Interrupted
from skerry.core.facts import Buffered
from skerry.core.state import state_of
from skerry.errors import DiskFull, FileDamaged, FileMissing, Refusal, StoreError, TapeDamaged
from skerry.run import backup, backups, room
from skerry.run.backup import back_up
from skerry.run.genesis import METADATA, create_run, read_genesis
from skerry.run.keys import Keys
from skerry.run.prune import carry_out, choose
from skerry.run.replay import replay
from skerry.run.restore import restore
from skerry.store import Store

SETTINGS = {"store": {"keep_every": 0.25, "record": "full", "segment_bytes": 1 << 16, "checkpoint_every": 4}}


@pytest.fixture
def pair(tmp_path):
    """A run that has kept a version and goes on when a test says so."""
    with Pair(tmp_path / "run", config_of(steps=200, **SETTINGS)) as pair:
        pair.join("a")
        pair.until(lambda: pair.syncer.machine.state.kept)
        pair.run(9)
        yield pair


@pytest.fixture
def root(tmp_path):
    with Pair(tmp_path / "run", config_of(steps=60, **SETTINGS)) as pair:
        pair.join("a")
        pair.until(lambda: pair.syncer.machine.state.kept)
        pair.syncer.handle(Interrupted(), pair.now)
        pair.syncer.look(pair.now)
    return pair.root


def state_in(root):
    with Store.open(root, readonly=True) as store:
        return state_of(store.records)


def replayed(root):
    with Store.open(root, readonly=True) as store:
        return replay(store)


def modes(folder):
    return {stat.S_IMODE(path.lstat().st_mode) & 0o077 for path in [folder, *folder.rglob("*")]}


# ---------------------------------------------------------------------------------------------- a run that goes on


def test_a_backup_of_a_run_that_goes_on_is_that_run_at_one_commit(pair, tmp_path):
    made = back_up(pair.root, tmp_path / "backups", 1.0)
    merges = pair.syncer.machine.state.merges
    pair.run(40)  # later commits, checkpoints that are collected
    assert restore(tmp_path / "backups", tmp_path / "again").merges == made.backup.merges <= merges
    report = replayed(tmp_path / "again")
    assert report.identical and report.recomputed == report.merges == made.backup.merges
    assert state_in(tmp_path / "again").kept == pair.syncer.machine.state.kept[:1]
    with Store.open(tmp_path / "again") as store:  # and can be gone on with
        assert state_of(store.records).merges == made.backup.merges


def test_a_second_backup_copies_only_what_is_not_there(pair, tmp_path):
    folder = tmp_path / "backups"
    first = back_up(pair.root, folder, 1.0)
    again = back_up(pair.root, folder, 2.0)
    assert first.copied_bytes == first.backup.bytes and (again.copied_bytes, again.copied_files) == (0, 0)
    pair.run(12)
    later = back_up(pair.root, folder, 3.0)
    old = {part.digest for part in first.backup.parts.values()}
    fresh = {part.digest: part.size for part in later.backup.parts.values() if part.digest not in old}
    assert 0 < later.copied_bytes == sum(fresh.values()) < later.backup.bytes
    for number in (1, 2, 3):
        restore(folder, tmp_path / f"again-{number}", number)
        assert replayed(tmp_path / f"again-{number}").identical


def test_the_newest_are_kept_and_the_pool_holds_what_they_need_and_no_more(pair, tmp_path):
    folder = tmp_path / "backups"
    for n in range(5):
        pair.run(8)
        made = back_up(pair.root, folder, float(n), keep=2)
    assert made.removed == (3,)
    found, damaged = backups.listed(folder)
    assert [each.number for each in found] == [4, 5] and not damaged
    needed = {part.digest for each in found for part in each.parts.values()}
    assert {path.name for path in (folder / "pool").iterdir()} == needed
    for each in found:
        restore(folder, tmp_path / f"again-{each.number}", each.number)


def test_a_checkpoint_that_is_collected_before_it_was_opened_is_no_failure(pair, tmp_path, monkeypatch):
    """As with any reader: the tape has gone on since, and is read again."""
    opened, ran = backup.opened, []

    def late(path):
        if path.parent.name == "files" and not ran:
            ran.append(pair.run(60))
        return opened(path)

    monkeypatch.setattr(backup, "opened", late)
    made = back_up(pair.root, tmp_path / "backups", 1.0)
    monkeypatch.undo()
    assert ran and made.backup.merges > 0
    restore(tmp_path / "backups", tmp_path / "again")
    assert replayed(tmp_path / "again").identical


def test_a_run_whose_tape_was_pruned_is_backed_up_from_where_it_begins(root, tmp_path):
    with Store.open(root) as store:
        state = state_of(store.records)
        carry_out(store, state, choose(store, state, 1e9, days=0.0))
    assert state_in(root).first_segment > 1
    made = back_up(root, tmp_path / "backups", 1.0)
    assert not any(name.endswith("000001.seg") or name.startswith("record/") for name in made.backup.parts)
    restore(tmp_path / "backups", tmp_path / "again")
    assert replayed(tmp_path / "again").agrees


# ---------------------------------------------------------------------------------------------- damage


def test_a_file_of_the_pool_that_rots_is_found_by_restore_and_mended_by_the_next_backup(root, tmp_path):
    folder = tmp_path / "backups"
    made = back_up(root, folder, 1.0)
    name = next(name for name in made.backup.parts if name.startswith("files/"))
    rotten = folder / "pool" / made.backup.parts[name].digest
    rotten.write_bytes(rotten.read_bytes()[:-1] + b"?")
    with pytest.raises(FileDamaged, match="is not what was written: take another backup"):
        restore(folder, tmp_path / "again")
    assert not list(tmp_path.glob("again*"))
    assert back_up(root, folder, 2.0).copied_files == 1
    assert restore(folder, tmp_path / "again", 1).number == 1


def test_a_run_that_is_damaged_is_not_backed_up_and_the_file_is_named(root, tmp_path):
    file = state_in(root).kept[0].checkpoints[0].file
    kept = (root / "files" / file).read_bytes()
    (root / "files" / file).write_bytes(kept[:-1] + b"?")
    with pytest.raises(FileDamaged, match=f"files/{file} differs from what was written: a backup has to be whole"):
        back_up(root, tmp_path / "backups", 1.0)
    (root / "files" / file).unlink()
    with pytest.raises(FileMissing, match=f"files/{file} is missing: .*--repair"):
        back_up(root, tmp_path / "backups", 1.0)
    assert backups.listed(tmp_path / "backups") == ([], [])


def test_buffers_that_are_lost_are_left_out_unless_a_syncer_may_just_have_collected_them(root, tmp_path):
    with Store.open(root) as store:
        file = store.put([b"buffers"])
        store.commit([msgspec.msgpack.encode(Buffered("a", 1, 0, 0, file, 1e3))], [file])
    name = f"files/{file}"
    assert name in back_up(root, tmp_path / "whole", 1.0).backup.parts
    (root / name).write_bytes(b"bufferz")
    assert back_up(root, tmp_path / "rotten", 1.0).backup.left_out == (name,)
    (root / name).unlink()
    made = back_up(root, tmp_path / "lost", 1.0)
    assert made.backup.left_out == (name,) and name not in made.backup.parts
    restore(tmp_path / "lost", tmp_path / "again")
    with Store.open(root), pytest.raises(FileMissing, match=f"{name} is missing"):
        back_up(root, tmp_path / "served", 1.0)


def test_a_backup_that_says_it_left_checkpoints_out_is_not_restored(root, tmp_path):
    folder = tmp_path / "backups"
    made = back_up(root, folder, 1.0)
    about = json.loads((folder / "backup-1.json").read_bytes())
    about["left_out"] = [name for name in made.backup.parts if name.startswith("files/")]
    about["parts"] = {name: part for name, part in about["parts"].items() if name not in about["left_out"]}
    (folder / "backup-1.json").write_text(json.dumps(about))
    with pytest.raises(FileMissing, match=f"{min(about['left_out'])} is missing: take another backup"):
        restore(folder, tmp_path / "again")
    assert not list(tmp_path.glob("again*"))


def test_what_a_backup_says_it_left_out_reaches_no_terminal_unless_it_is_a_files_name(root, tmp_path):
    back_up(root, tmp_path / "backups", 1.0)
    path = tmp_path / "backups" / "backup-1.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"left_out": ["record/\x1b[2J"]}))
    with pytest.raises(Refusal, match=r"leaves out 'record/\\x1b\[2J', which no backup has"):
        restore(tmp_path / "backups", tmp_path / "again")


def without(folder, name):
    """As if the first backup had been written without this file."""
    about = json.loads((folder / "backup-1.json").read_bytes())
    del about["parts"][name]
    (folder / "backup-1.json").write_text(json.dumps(about))


def test_a_backup_without_a_recorded_contribution_is_not_restored(root, tmp_path):
    made = back_up(root, tmp_path / "backups", 1.0)
    name = min(name for name in made.backup.parts if name.startswith("record/"))
    without(tmp_path / "backups", name)
    with pytest.raises(FileMissing, match=f"{name} is missing: take another backup"):
        restore(tmp_path / "backups", tmp_path / "again")
    assert not list(tmp_path.glob("again*"))


def recorded_in(root):
    return sorted((root / "record").iterdir())


def rot(path):
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def put_a_folder_in_place(path):
    path.unlink()
    path.mkdir()


def put_a_link_in_place(path):
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


@pytest.mark.parametrize("spoil", [rot, os.unlink, put_a_folder_in_place, put_a_link_in_place])
def test_a_recorded_contribution_that_is_lost_is_left_out_and_said_and_replay_names_it(root, tmp_path, capsys, spoil):
    """Nobody can give it again, and the run does without."""
    lost = recorded_in(root)[3]
    spoil(lost)
    code, out, err = called(capsys, "backup", root, tmp_path / "backups")
    assert code == 0 and "is whole but for what is named above" in out
    cost = "was damaged or missing, and is left out; the run can do without, a replay that comes to it stops"
    assert err == f"{lost}: {cost}\n"
    again = tmp_path / "again"
    code, out, err = called(capsys, "restore", tmp_path / "backups", again)
    assert (
        code == 0
        and "it is whole but for what is named above" in out
        and err == f"{again}/record/{lost.name}: {cost}\n"
    )
    assert state_in(again) == state_in(root)
    with pytest.raises(FileDamaged, match=f"record [0-9]+ at byte [0-9]+: {again}/record/{lost.name} is missing"):
        replayed(again)
    assert back_up(again, tmp_path / "backups", 2.0).backup.left_out == (f"record/{lost.name}",)


def test_a_run_that_is_served_is_backed_up_without_a_lost_contribution(pair, tmp_path):
    lost = recorded_in(pair.root)[:2]
    rot(lost[0])
    lost[1].unlink()
    made = back_up(pair.root, tmp_path / "backups", 1.0)
    assert sorted(made.backup.left_out) == [f"record/{path.name}" for path in lost]
    restore(tmp_path / "backups", tmp_path / "again")


def test_of_many_lost_contributions_a_few_are_named_and_all_are_counted(root, tmp_path, capsys):
    lost = recorded_in(root)
    for path in lost:
        path.unlink()
    code, _, err = called(capsys, "backup", root, tmp_path / "backups")
    lines = err.splitlines()
    assert (
        code == 0 and len(lines) == 11 and lines[-1] == f"{root}: {len(lost) - 10} more are left out; --json names all"
    )
    code, out, _ = called(capsys, "restore", tmp_path / "backups", tmp_path / "again", "--json")
    assert code == 0 and json.loads(out)["left_out"] == [f"record/{path.name}" for path in lost]


def test_a_lost_contribution_that_an_earlier_backup_has_is_in_the_next_too(root, tmp_path):
    back_up(root, tmp_path / "backups", 1.0)
    rot(recorded_in(root)[0])
    recorded_in(root)[1].unlink()
    assert not back_up(root, tmp_path / "backups", 2.0).backup.left_out
    restore(tmp_path / "backups", tmp_path / "again")
    assert replayed(tmp_path / "again").identical


def test_contributions_that_are_pruned_meanwhile_are_not_taken_for_lost(root, tmp_path, monkeypatch):
    lexists, pruned = os.path.lexists, []

    def late(path):
        if "/record/" in str(path) and not pruned:
            with Store.open(root) as store:
                state, store.tape.prune = state_of(store.records), lambda first: 0  # the tape goes a moment later
                pruned.append(carry_out(store, state, choose(store, state, 1e9, days=0.0)))
        return lexists(path)

    monkeypatch.setattr(os.path, "lexists", late)
    made = back_up(root, tmp_path / "backups", 1.0)
    assert pruned and not made.backup.left_out
    restore(tmp_path / "backups", tmp_path / "again")
    assert replayed(tmp_path / "again").agrees and state_in(tmp_path / "again").first_segment > 1


def test_a_backup_without_what_is_not_trained_is_not_restored(tmp_path):
    arrays = {"w": np.zeros((20, 30), np.float32), "frozen": np.arange(12, dtype=np.int64)}
    said = {"embeddings": [], "trained": ["w"], "buffers": [], "aliases": {}, "files": {}}
    save_file(arrays, tmp_path / "g.safetensors", {METADATA: json.dumps(said)})
    with Store.open(tmp_path / "run") as store:
        create_run(store, config_of(sync={"num_fragments": 1}), *read_genesis(tmp_path / "g.safetensors"))
    back_up(tmp_path / "run", tmp_path / "backups", 1.0)
    without(tmp_path / "backups", "fixed.safetensors")
    with pytest.raises(FileMissing, match=r"fixed\.safetensors is missing: take another backup"):
        restore(tmp_path / "backups", tmp_path / "again")


def test_a_tape_that_was_cut_off_is_not_backed_up(root, tmp_path):
    (root / "status.json").write_text(json.dumps({"merges": 10**6}))
    with pytest.raises(TapeDamaged, match="truncated: the tape ends with"):
        back_up(root, tmp_path / "backups", 1.0)


def test_a_backup_that_cannot_be_read_is_named_and_costs_the_others_nothing(root, tmp_path):
    folder = tmp_path / "backups"
    back_up(root, folder, 1.0)
    (folder / "backup-1.json").write_text('{"x":' + "[" * 100_000)
    made = back_up(root, folder, 2.0, keep=1)
    assert made.backup.number == 2 and [line.startswith(f"{folder}/backup-1.json") for line in made.damaged] == [True]
    stray = folder / "pool" / (64 * "0")
    stray.write_bytes(b"")
    assert back_up(root, folder, 3.0, keep=1).removed == (2,) and stray.exists(), "nobody knows whose it is"
    (folder / "backup-1.json").unlink()
    back_up(root, folder, 4.0, keep=1)
    assert not stray.exists()
    restore(folder, tmp_path / "again")


def test_a_backup_that_names_another_place_is_not_believed(root, tmp_path):
    """Somebody else may have written the folder: nothing is put outside of the new directory."""
    folder = tmp_path / "backups"
    back_up(root, folder, 1.0)
    about = json.loads((folder / "backup-1.json").read_bytes())
    for name in ("../evil", "/etc/evil", "tape/../../evil", "files/../evil", "keys/../evil", "logs/x"):
        wrong = about | {"parts": about["parts"] | {name: next(iter(about["parts"].values()))}}
        (folder / "backup-1.json").write_text(json.dumps(wrong))
        with pytest.raises(Refusal, match="which no backup has: take another backup with --at: there are none"):
            restore(folder, tmp_path / "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["backups", "run"]


def test_links_in_a_run_or_in_the_folder_are_not_followed(root, tmp_path):
    folder, secret = tmp_path / "backups", tmp_path / "secret"
    secret.write_text("secret")
    back_up(root, folder, 1.0)
    part = next(iter(backups.listed(folder)[0][0].parts.values()))
    (folder / "pool" / part.digest).unlink()
    (folder / "pool" / part.digest).symlink_to(secret)
    with pytest.raises(Refusal, match="is a link or no plain file"):
        restore(folder, tmp_path / "again")
    (root / "evaluations.jsonl").symlink_to(secret)
    with pytest.raises(StoreError):
        back_up(root, tmp_path / "others", 1.0)


def test_a_backup_removes_nothing_through_a_link_and_nothing_that_is_not_its_own(root, tmp_path):
    folder, theirs = tmp_path / "backups", tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    names = ["thesis.tex", "notes.tmp", 64 * "0", f"{64 * '0'}.{16 * '0'}.tmp"]
    for name in names:
        (theirs / name).write_text("mine")
    back_up(root, folder, 1.0)
    (folder / "pool" / "thesis.tex").write_text("mine")
    back_up(root, folder, 2.0)
    assert (folder / "pool" / "thesis.tex").exists()
    (folder / "pool").rename(tmp_path / "pool")
    (folder / "pool").symlink_to(theirs)
    for do in (lambda: back_up(root, folder, 3.0), lambda: restore(folder, tmp_path / "again")):
        with pytest.raises(Refusal, match="pool: is a link, or no folder"):
            do()
    assert sorted(os.listdir(theirs)) == sorted(names)
    (folder / "pool").unlink()
    (tmp_path / "pool").rename(folder / "pool")
    (folder / "pool" / (64 * "0")).symlink_to(theirs / "thesis.tex")
    with pytest.raises(Refusal, match=r"pool: has '0+', which is a link or no plain file: remove it"):
        back_up(root, folder, 3.0)


def test_a_pipe_in_a_folder_of_backups_is_not_waited_for(root, tmp_path):
    folder = tmp_path / "backups"
    back_up(root, folder, 1.0)
    (folder / "lock").unlink()
    os.mkfifo(folder / "lock")
    for do in (lambda: back_up(root, folder, 2.0), lambda: restore(folder, tmp_path / "again")):
        with pytest.raises(Refusal, match="lock: is no plain file: remove it"):
            do()


# ---------------------------------------------------------------------------------------------- crashes


def ends_at(count, do):
    """Whether a process that is killed at its so-manieth fsync or rename gets to its end."""
    pid = os.fork()
    if pid:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, -signal.SIGKILL), "it was refused, after a crash"
        return code == 0
    left = [count]

    def strike(call):
        def struck(*args, **options):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)

        return struck

    try:
        os.fsync, os.replace, os.rename = strike(os.fsync), strike(os.replace), strike(os.rename)
        do()
        os._exit(0)
    finally:
        os._exit(1)


def crashes(do):
    """After each crash at a further place, until it comes to its end."""
    for count in range(1, 10_000):
        if ends_at(count, do):
            assert count > 10
            return
        yield count


def test_a_backup_that_is_killed_anywhere_is_not_there_and_the_next_is_whole(root, tmp_path):
    folder = tmp_path / "backups"
    for count in crashes(lambda: back_up(root, folder, 1.0, keep=1)):
        found, damaged = backups.listed(folder) if folder.exists() else ([], [])
        assert not damaged
        for each in found:  # it was killed after that
            restore(folder, tmp_path / f"after-{count}", each.number)
    made = back_up(root, folder, 2.0, keep=1)
    assert {path.name for path in (folder / "pool").iterdir()} == {p.digest for p in made.backup.parts.values()}
    restore(folder, tmp_path / "again")
    assert replayed(tmp_path / "again").identical


def test_a_restore_that_is_killed_anywhere_leaves_nothing_that_looks_like_a_run(root, tmp_path):
    folder, again = tmp_path / "backups", tmp_path / "again"
    back_up(root, folder, 1.0)
    for _ in crashes(lambda: restore(folder, again)):
        if again.exists():  # killed after that: nothing but the name's durability was left to do
            assert replayed(again).identical
            break
        for left in tmp_path.glob("again.*"):
            if (left / "tape").exists():  # all is durable and was looked at; the directory lacks its name
                assert replayed(left).identical
    else:
        assert replayed(again).identical


def test_what_a_killed_restore_has_left_goes_with_the_next_to_that_name_unless_one_is_at_work(root, tmp_path, capsys):
    folder, again = tmp_path / "backups", tmp_path / "again"
    back_up(root, folder, 1.0)
    left, held, theirs = (tmp_path / f"again.{letter * 16}.tmp" for letter in "abc")
    for each, name in ((left, "tape.unfinished"), (held, "tape"), (theirs, "letters")):
        (each / name).mkdir(parents=True)
    _, out, _ = called(capsys, "runs", tmp_path, "--json")
    assert [each["run_dir"] for each in json.loads(out)["runs"]] == [str(root)], "no row for what is no run yet"
    fd = os.open(held, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    restore(folder, again)
    os.close(fd)
    assert replayed(again).identical and not left.exists() and held.exists() and theirs.exists()


# ---------------------------------------------------------------------------------------------- refused


def test_a_full_disk_is_refused_before_with_numbers(root, tmp_path, monkeypatch):
    back_up(root, tmp_path / "backups", 1.0)
    monkeypatch.setattr(backups, "free_disk", lambda where: 1000)
    for do in (
        lambda: back_up(root, tmp_path / "others", 1.0),
        lambda: restore(tmp_path / "backups", tmp_path / "again"),
    ):
        with pytest.raises(DiskFull, match=r"takes .*B, 1e\+03 B are free|takes .* are free: free space"):
            do()
    assert back_up(root, tmp_path / "backups", 2.0).copied_bytes == 0  # which takes no room
    assert not (tmp_path / "again").exists() and not list((tmp_path / "others" / "pool").iterdir())
    assert room.free_disk(tmp_path) > 1000


def test_what_cannot_be_is_refused_and_nothing_is_written(root, tmp_path):
    folder = tmp_path / "backups"
    with pytest.raises(Refusal, match="lies in a run's directory: name a folder elsewhere, best on another disk"):
        back_up(root, root / "backups", 1.0)
    with pytest.raises(StoreError, match="holds no run"):
        back_up(tmp_path / "nothing", folder, 1.0)
    assert not folder.exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    with pytest.raises(Refusal, match="has other things in it"):
        back_up(root, tmp_path / "full", 1.0)
    with pytest.raises(Refusal, match="is no folder of backups"):
        restore(folder, tmp_path / "again")
    back_up(root, folder, 1.0)
    with pytest.raises(Refusal, match="has no backup 7 that can be read: there are 1"):
        restore(folder, tmp_path / "again", 7)
    with pytest.raises(Refusal, match="is there already"):
        restore(folder, root)
    with Pair(tmp_path / "other", config_of(steps=60)) as other, pytest.raises(Refusal, match="of another run"):
        back_up(other.root, folder, 2.0)
    folder.chmod(0o777)
    with pytest.raises(Refusal, match="others may write to it"):
        restore(folder, tmp_path / "again")


def test_one_backup_at_a_time(root, tmp_path):
    folder = tmp_path / "backups"
    back_up(root, folder, 1.0)
    with backups.holding(folder, is_shared=False):
        for do in (lambda: back_up(root, folder, 2.0), lambda: restore(folder, tmp_path / "again")):
            with pytest.raises(Refusal, match="another backup or restore is under way"):
                do()
    with backups.holding(folder, is_shared=True):
        restore(folder, tmp_path / "again")


# ---------------------------------------------------------------------------------------------- keys


def test_keys_are_in_a_backup_only_if_that_is_said_and_nothing_is_for_others(root, tmp_path):
    Keys(root).issue("island")
    before = os.umask(0)
    try:
        assert not back_up(root, tmp_path / "plain", 1.0).backup.has_keys
        assert back_up(root, tmp_path / "keyed", 1.0, with_keys=True).backup.has_keys
        restore(tmp_path / "plain", tmp_path / "without")
        restore(tmp_path / "keyed", tmp_path / "with")
    finally:
        os.umask(before)
    authority = (root / "keys" / "ca.pem").read_bytes()
    assert not any(authority in path.read_bytes() for path in (tmp_path / "plain").rglob("*") if path.is_file())
    assert not (tmp_path / "without" / "keys").exists()
    assert Keys(tmp_path / "with").rows() == Keys(root).rows()
    assert {m for name in ("plain", "keyed", "with", "without") for m in modes(tmp_path / name)} == {0}


@pytest.mark.parametrize(
    "words",
    [["syncer", "--port", 0, "--run"], ["fork", "FROM"], ["restore", "BACKUPS"], ["train", "--steps", 9, "--out"]],
)
def test_no_run_is_made_in_the_directory_of_another(root, tmp_path, capsys, words):
    back_up(root, tmp_path / "backups", 1.0)
    places = {"FROM": root, "BACKUPS": tmp_path / "backups"}
    write_genesis(tmp_path / "genesis.safetensors")
    more = ["--genesis", tmp_path / "genesis.safetensors", "--run.steps", 9] if words[0] == "syncer" else []
    (tmp_path / "link").symlink_to(root / "files")
    for inside in (root / "new", tmp_path / "link" / "deep" / "new"):
        code, _, err = called(capsys, *[places.get(word, word) for word in words], inside, *more)
        assert code == 2 and err == f"skerry: {inside}: lies in a run's directory: name a folder elsewhere\n"
        assert not inside.exists() and not inside.parent.joinpath("deep").exists()


def test_a_folder_that_is_only_called_tape_is_no_run(root, tmp_path):
    (tmp_path / "music" / "tape").mkdir(parents=True)
    back_up(root, tmp_path / "music" / "backups", 1.0)
    restore(tmp_path / "music" / "backups", tmp_path / "music" / "again")


def test_the_commands_say_what_was_done_and_how_to_go_on(root, tmp_path, capsys):
    folder = tmp_path / "backups"
    code, out, err = called(capsys, "backup", root, folder)
    assert (code, err) == (0, "") and "is whole" in out and f"skerry restore {folder} NEW_RUN_DIR --at 1" in out
    code, out, _ = called(capsys, "backup", root, folder, "--keep", 1, "--json")
    said = json.loads(out)
    assert code == 0 and (said["backup"], said["removed"], said["copied_files"]) == (2, [1], 0)
    code, out, _ = called(capsys, "restore", folder)
    assert code == 0 and [line.split()[0] for line in out.splitlines()[1:]] == ["2"]
    code, out, _ = called(capsys, "restore", folder, tmp_path / "again")
    assert code == 0 and "do not serve it any more" in out and "is ahead of this tape" in out
    assert f"go on with: skerry syncer --run {tmp_path / 'again'}" in out
    code, out, _ = called(capsys, "restore", folder, tmp_path / "again", "--json")
    assert code == 2 and "is there already" in json.loads(out)["error"]
