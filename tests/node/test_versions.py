"""A version out of the store: the very values there were, by whatever checkpoint leads to them."""

import msgspec
import numpy as np
import pytest

from node.pair import Pair, config_of
from skerry.algo.fragments import Tensor, layout_of, split
from skerry.core.facts import Checkpointed, Committed
from skerry.core.state import created, decode_fact
from skerry.errors import FileDamaged
from skerry.memory import PAGE_BYTES
from skerry.node import versions
from skerry.node.algebra import FLOAT32, Values
from skerry.store import Store
from skerry.store.files import LONG_BYTES
from skerry.store.journal import Place, where

# an outer state that is not zero, and values that rounding has been at
STATEFUL = {
    "outer": {"rule": "nesterov", "lr": 0.7, "momentum": 0.9},
    "wire": {"codec_up": "int8", "codec_down": "int4"},
}
EVERY = 4


@pytest.fixture
def pair(tmp_path):
    """A run of three fragments with a few checkpoints of each, and merges since the last."""
    with Pair(tmp_path / "run", config_of(**STATEFUL, store={"checkpoint_every": EVERY})) as pair:
        pair.join("a")
        pair.until(lambda: min(pair.versions) > 3 * EVERY and all(map(is_behind, fragments_in(pair))))
        yield pair


def fragments_in(pair):
    return pair.syncer.machine.state.fragments


def is_behind(at):
    """There are merges to be done again."""
    return at.checkpoints[-1].version < at.version


def same(a, b):
    """To the bit: -0.0 is not 0.0."""
    return all(np.array_equal(x.view(np.uint32), y.view(np.uint32)) for x, y in zip(a, b, strict=True))


def rot(path, at=0):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def file_of(pair, checkpoint):
    return pair.root / "files" / checkpoint.file


def rot_entry(pair, redo):
    place = Place(*redo.entry)
    rot(pair.root / "journal" / f"{place.file:06d}.log", place.offset + place.size // 2)
    return f"{pair.root}/{where(place)}"


def test_the_newest_of_every_fragment_is_what_the_syncer_has_to_the_bit(pair):
    state = pair.syncer.machine.state
    assert all(map(is_behind, state.fragments))
    assert all(np.any(values.velocity) and np.any(values.error) for values in pair.syncer.values)
    for threads in (1, 3):
        found = versions.newest(pair.store, state, pair.fragments, threads=threads)
        assert all(map(same, found, pair.syncer.values))
        assert [FLOAT32.state_digest(values) for values in found] == [at.state for at in state.fragments]


def test_every_version_since_the_first_checkpoint_can_be_had(pair):
    for p, at in enumerate(fragments_in(pair)):
        for version in range(at.checkpoints[0].version, at.version + 1):
            values = versions.load(pair.store, pair.fragments[p], at, version=version)
            assert same(values, pair.values_of()[p, version]), (p, version)


def test_a_version_that_is_no_longer_kept(pair):
    at = fragments_in(pair)[1]
    with pytest.raises(
        FileDamaged, match=f"^fragment 1: version {at.checkpoints[0].version - 1} is not kept any more$"
    ):
        versions.load(pair.store, pair.fragments[1], at, version=at.checkpoints[0].version - 1)


def test_collecting_leaves_all_that_is_needed(pair):
    """By what the state says is needed, and by nothing that is in this process."""
    pair.store.journal.file_bytes = 1
    pair.run(20)
    state = pair.syncer.machine.state
    assert pair.store.collect(state.files, state.journal) > 0
    pair.restart()
    found = versions.newest(pair.store, pair.syncer.machine.state, pair.fragments)
    assert all(map(same, found, pair.syncer.values))
    for p, at in enumerate(state.fragments):
        for version in range(at.checkpoints[0].version, at.version + 1):
            versions.load(pair.store, pair.fragments[p], at, version=version)


def test_a_rotten_checkpoint_is_passed_over_for_the_one_before_with_a_word(pair, caplog):
    at, fragment = fragments_in(pair)[0], pair.fragments[0]
    before, last = at.checkpoints[-2:]
    rot(file_of(pair, last))
    assert same(versions.load(pair.store, fragment, at), pair.syncer.values[0])
    (line,) = caplog.messages
    assert line == (
        f"fragment 0: {file_of(pair, last)} differs from what was written: restore it from a copy; "
        f"taken from version {before.version} instead"
    )
    file_of(pair, last).unlink()
    assert same(versions.load(pair.store, fragment, at), pair.syncer.values[0])
    assert f"{file_of(pair, last)} is missing" in caplog.text


def test_an_entry_that_rotted_before_the_last_checkpoint_harms_nobody(pair, caplog):
    at = fragments_in(pair)[0]
    rot_entry(pair, at.redo[0])
    assert at.redo[0].version <= at.checkpoints[-1].version
    assert same(versions.load(pair.store, pair.fragments[0], at), pair.syncer.values[0]) and caplog.messages == []


def test_a_syncer_begins_from_what_is_left(pair, caplog):
    state, values = pair.syncer.machine.state, pair.syncer.values
    for at in state.fragments:
        rot(file_of(pair, at.checkpoints[-1]))
    pair.restart()
    assert all(map(same, pair.syncer.values, values)) and caplog.text.count("written anew") == len(values)


def test_when_every_checkpoint_is_rotten_the_newest_is_named(pair):
    at = fragments_in(pair)[2]
    for checkpoint in at.checkpoints:
        rot(file_of(pair, checkpoint))
    with pytest.raises(FileDamaged) as caught:
        versions.load(pair.store, pair.fragments[2], at)
    assert str(caught.value).startswith(f"{file_of(pair, at.checkpoints[-1])} differs from what was written")


def test_a_rotten_entry_is_named_and_the_version_before_it_can_be_had(pair):
    at, fragment = fragments_in(pair)[1], pair.fragments[1]
    bad = at.redo[-1]
    place = rot_entry(pair, bad)
    with pytest.raises(FileDamaged) as caught:
        versions.load(pair.store, fragment, at)
    assert str(caught.value).startswith(f"{place}: {bad.entry.size} bytes are not what was written")
    values = versions.load(pair.store, fragment, at, version=bad.version - 1)
    assert same(values, pair.syncer.values[1]) is False and FLOAT32.state_digest(values) == at.redo[-2].state


def test_values_that_are_others_when_done_again_are_not_believed(pair):
    """The entry is as it was written and yet gives something else: say, another version of a library."""
    at = fragments_in(pair)[0]
    at.redo[-1] = msgspec.structs.replace(at.redo[-1], lr=at.redo[-1].lr / 2)
    with pytest.raises(
        FileDamaged, match=f"^fragment 0 version {at.version}: what checkpoint and journal give is another"
    ):
        versions.load(pair.store, pair.fragments[0], at)


# ------------------------------------------------------------------------------------------ what is kept


def test_two_checkpoints_are_kept_and_every_merge_since_the_first_of_them(pair):
    for at in fragments_in(pair):
        assert len(at.checkpoints) == 2
        assert [redo.version for redo in at.redo] == list(range(at.checkpoints[0].version + 1, at.version + 1))


def test_what_the_closing_began_with_can_be_had_after_the_end(tmp_path):
    """However many merges and checkpoints the closing has: export before the closing asks for it."""
    config = config_of(2, steps=60, store={"checkpoint_every": 2}, **STATEFUL)
    with Pair(tmp_path / "run", config) as pair:
        for name in "ab":
            pair.join(name)
        pair.close()
        state = pair.syncer.machine.state
        values = pair.values_of()
        assert state.phase == "closed" and state.before_close
        assert any(v < at.version for v, at in zip(state.before_close, state.fragments, strict=True))
        pair.store.collect(state.files, state.journal)
        for p, version in enumerate(state.before_close):
            kept = versions.load(pair.store, pair.fragments[p], state.fragments[p], version=version)
            assert same(kept, values[p, version])


def test_the_pinned_version_stays_through_any_number_of_checkpoints_of_the_closing(pair):
    facts = [decode_fact(record.body) for record in pair.store.history()]
    state = created(facts[0])
    pinned = EVERY + 2
    for fact in facts[1:]:
        if isinstance(fact, Committed | Checkpointed):
            state.apply(fact)
            if state.fragments[0].version == pinned and not state.before_close:
                state.before_close = tuple(at.version for at in state.fragments)
    at = state.fragments[0]
    assert at.checkpoints[0].version <= pinned < at.checkpoints[-2].version
    values = versions.load(pair.store, pair.fragments[0], at, version=pinned)
    assert same(values, pair.values_of()[0, pinned])


@pytest.mark.parametrize("size", [1000, LONG_BYTES // 4 + 128], ids=["short", "long"])
@pytest.mark.parametrize("there", [("theta",), ("theta", "error"), ("theta", "velocity", "error")], ids=len)
def test_a_version_is_what_its_file_says_and_long_arrays_begin_where_a_disk_can_take_them(tmp_path, size, there):
    (fragment,) = split(layout_of([Tensor("weight", (size,))]), 1)
    numbers = np.arange(1, fragment.size + 1, dtype=np.float32)
    values = Values(*(numbers if name in there else np.zeros_like(numbers) for name in Values._fields))
    with Store.open(tmp_path) as store:
        data = store.get(store.put(FLOAT32.parts(values)))
    assert same(FLOAT32.load(data, fragment), values)
    header_bytes = len(data) - len(there) * numbers.nbytes
    assert header_bytes == (PAGE_BYTES if numbers.nbytes >= LONG_BYTES else 8)
    with pytest.raises(FileDamaged, match="is none of this fragment"):
        FLOAT32.load(data[:-4], fragment)
