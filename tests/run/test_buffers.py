"""A run's buffers: of learners that trained lately, the mean by tokens of floats, and the newest of everything else."""

import json
import tracemalloc

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load, save

from node.pair import Pair, config_of
from skerry.algo.contents import Contents, Fixed
from skerry.algo.fragments import Tensor, layout_of
from skerry.config import Config
from skerry.core.facts import Buffered, Discarded, LifeStarted, Paused, Row, Seen
from skerry.core.messages import Buffers
from skerry.core.state import state_of
from skerry.node.buffers import looked_at
from skerry.run.buffers import of_learners
from skerry.run.genesis import begin
from skerry.store import Store

CONTENTS = Contents(
    fixed=(
        Fixed("mean", "F32", (2,), "buffer"),
        Fixed("rough", "BF16", (1,), "buffer"),
        Fixed("count", "I64", (), "buffer"),
        Fixed("base", "F32", (2,), "frozen"),
    )
)


FRAGMENTS = 1  # of a model of one tensor


def begun(store, contents=CONTENTS):
    begin(store, Config(), layout_of([Tensor("w", (3,))]), lambda f: np.zeros(f.size, np.float32), contents=contents)


def state_at(root):
    with Store.open(root, readonly=True) as store:
        return state_of(store.records)


def given(store, learner, tokens, at_s, claimed=0, merged=None, **arrays):
    """Buffers after so many tokens, as the learner claims, and as the books have it; so many of them are merged."""
    merged = tokens if merged is None else merged
    rows = [Row(learner, 1, p, 0, 0, 1, merged, "merged", 1) for p in range(FRAGMENTS)]
    file = store.put([save({name: np.asarray(array) for name, array in arrays.items()})])
    facts = [
        LifeStarted(learner, 1, learner, 0, 0.0),
        Paused((Seen(learner, 1, 1, tokens, 0, 0, 0.0),), at_s),
        *([Discarded(tuple(rows), (), at_s)] if merged else []),  # a row is a row, whichever fact has it
        Buffered(learner, 1, 1, claimed or tokens, file, at_s),
    ]
    store.commit([msgspec.msgpack.encode(fact) for fact in facts], [file])


def test_floats_are_averaged_by_tokens_and_counts_taken_from_the_newest(tmp_path):
    with Store.open(tmp_path) as store:
        begun(store)
        given(store, "gone", 10**9, 800.0, mean=np.float32([99, 99]), count=np.int64(99))
        given(store, "newest", 100, 1000.0, mean=np.float32([1, 5]), count=np.int64(7))
        given(store, "slow", 300, 950.0, 2**53, mean=np.float32([3, 5]), count=np.int64(2))
        given(store, "liar", 2**40, 1000.0, merged=0, mean=np.float32([1e30, 1e30]), count=np.int64(-1))
    with Store.open(tmp_path) as store:
        state = state_of(store.records)
        found = of_learners(tmp_path, state)
        store.collect(state.files)
        assert of_learners(tmp_path, state) == found, "a run keeps them"
    assert np.frombuffer(found["mean"], np.float32).tolist() == [2.5, 5.0]
    assert np.frombuffer(found["count"], np.int64).tolist() == [7]
    assert "rough" not in found, "nobody has changed it"


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"mean": np.float32([1, 2]), "count": np.int64(1)}, ""),
        ({"mean": np.float32([1, np.inf])}, "mean holds values that are not finite"),
        ({"mean": np.float32([1, 2, 3])}, "mean is F32 of shape (3,), and F32 of shape (2,) in the run's model"),
        ({"count": np.int32(1)}, "count is I32 of shape (), and I64 of shape () in the run's model"),
        ({"base": np.float32([1, 2])}, "base (F32 of shape (2,)) is no buffer of the run's model"),
    ],
)
def test_what_is_no_buffer_of_the_run_is_refused(arrays, says):
    gift = looked_at(save({name: np.asarray(array) for name, array in arrays.items()}), CONTENTS)
    assert gift.flaw == says and bool(gift.data) == (not says)


@pytest.mark.parametrize("data", [b"", b"junk", b"\xff" * 99, (1 << 40).to_bytes(8, "little") + b"{}"])
def test_bytes_that_are_no_safetensors_are_refused(data):
    assert looked_at(data, CONTENTS).flaw.startswith("they cannot be read")


def test_a_gift_of_more_names_than_the_run_has_buffers_is_not_looked_at():
    """To look at a hundred thousand names takes seconds, and whatever else a syncer does waits for them."""
    odd = {f"t{number:06}": np.empty(0, np.uint8) for number in range(2000)}
    flaw = looked_at(save(odd | {"mean": np.float32([1, 2])}), CONTENTS).flaw
    assert flaw == "they are 2001 or so, and the run's model has 3"
    few = dict(list(odd.items())[:250])
    assert looked_at(save(few | {"mean": np.float32([1, 2])}), CONTENTS).strange.endswith("and 249 more are none")


@pytest.mark.parametrize(
    ("there", "dtype", "value", "flaw"),
    [
        ("F32", np.float64, 1e300, "larger (1e+300) than F32 can hold, its dtype in the run's model"),
        ("F16", np.float32, -65505, "larger (6.55e+04) than F16 can hold, its dtype in the run's model"),
        ("BF16", np.float64, 3.4e38, "larger (3.4e+38) than BF16 can hold, its dtype in the run's model"),
        ("F32", np.float64, 3.4e38, ""),
        ("F16", np.float32, -65504, ""),
        ("F64", np.float64, 1e300, ""),
    ],
)
def test_what_the_runs_dtype_cannot_hold_is_refused(tmp_path, there, dtype, value, flaw):
    contents = Contents(fixed=(Fixed("mean", there, (2,), "buffer"),))
    data = save({"mean": np.asarray([1, value], dtype)})
    gift = looked_at(data, contents)
    assert gift.flaw == (f"mean holds values that are {flaw}" if flaw else "")
    with Store.open(tmp_path) as store:  # as runs have them whose syncer did not look for it
        begun(store, contents)
        given(store, "a", 100, 1000.0, mean=np.asarray([1, value], dtype))
    found = of_learners(tmp_path, state_at(tmp_path))
    assert ("mean" in found) == (not flaw)


def test_of_a_gift_the_buffers_of_the_run_alone_are_kept():
    arrays = {"mean": np.float16([1, 2]), "count": np.asarray(7), "junk": np.zeros(1 << 16, np.uint8)}
    kept = looked_at(save(arrays), CONTENTS).data
    assert {name: array.tolist() for name, array in load(kept).items()} == {"mean": [1.0, 2.0], "count": 7}
    assert kept == looked_at(kept, CONTENTS).data, "the same bytes have the same name"


@pytest.mark.parametrize(
    ("dtype", "finite", "others"),
    [
        ("F64", "ffffffffffffef7f", ["000000000000f07f", "000000000000f0ff", "010000000000f07f"]),
        ("F32", "ffff7f7f", ["0000807f", "000080ff", "0100807f"]),
        ("C64", "ffff7f7fffff7fff", ["0000807f00000000", "00000000000080ff", "000000000100c07f"]),
        ("F16", "ff7b", ["007c", "00fc", "017c"]),
        ("BF16", "7f7f", ["807f", "80ff", "817f"]),
        ("F8_E5M2", "7b", ["7c", "fc", "7f"]),
        ("F8_E4M3", "7e", ["7f", "ff"]),
        ("F8_E8M0", "fe", ["ff"]),
        ("F8_E5M2FNUZ", "7f", ["80"]),
        ("F8_E4M3FNUZ", "7f", ["80"]),
        ("I8", "80", []),
    ],
)
def test_numbers_that_are_not_finite_are_refused_in_whatever_dtype(dtype, finite, others):
    """The largest that is, and infinities and numbers that are none, as bytes."""
    size = len(bytes.fromhex(finite))
    head = json.dumps({"odd": {"dtype": dtype, "shape": [2], "data_offsets": [0, 2 * size]}}).encode()
    head = len(head).to_bytes(8, "little") + head + bytes(size)
    contents = Contents(fixed=(Fixed("odd", dtype, (2,), "buffer"),))
    assert looked_at(head + bytes.fromhex(finite), contents).flaw == ""
    for other in others:
        assert looked_at(head + bytes.fromhex(other), contents).flaw == "odd holds values that are not finite"


def test_of_a_learners_buffers_those_of_the_run_are_kept_and_the_others_are_named(tmp_path, caplog):
    """A model may have names that the run does not know, or be of fewer bits: its statistics are worth something."""
    arrays = {"mean": np.float16([1, 2]), "seen": np.float32([1]), "sawn": np.float32([1])}
    with Pair(tmp_path / "run", config_of()) as pair:
        pair.join("a")
        pair.run(8)
        pair.syncer.contents = CONTENTS
        pair.syncer.buffers(Buffers("a", 1, 4, 32, save(arrays)))
        pair.run(1)
        given = pair.syncer.machine.state.buffers["a"]
    assert caplog.messages == [
        "left out of the buffers of a: sawn (F32 of shape (1,)) is no buffer of the run's model, and 1 more are none"
    ]
    with Store.open(tmp_path / "other") as store:
        begun(store)
        assert store.put([(tmp_path / "run" / "files" / given.file).read_bytes()]) == given.file
        facts = [LifeStarted("a", 1, "a", 0, 0.0), Buffered("a", 1, 4, 32, given.file, 0.0)]
        store.commit([msgspec.msgpack.encode(fact) for fact in facts], [given.file])
    found = of_learners(tmp_path / "other", state_at(tmp_path / "other"))
    assert {name: np.frombuffer(data, np.float32).tolist() for name, data in found.items()} == {"mean": [1, 2]}


def test_what_is_wrong_with_a_learners_buffers_is_said_once(tmp_path, caplog):
    with Pair(tmp_path / "run", config_of()) as pair:
        pair.join("a")
        pair.run(8)
        pair.syncer.contents = CONTENTS
        for step in range(4, 44):
            pair.syncer.buffers(Buffers("a", 1, step, 8 * step, b"junk"))
            pair.run(1)
        assert "a" not in pair.syncer.machine.state.buffers
    (line,) = caplog.messages
    assert line.startswith("refused the buffers of a: they cannot be read")


@pytest.mark.parametrize("is_restarted", [False, True])
def test_before_a_merge_what_newer_buffers_replace_is_removed_unless_it_lay_there(tmp_path, is_restarted):
    """Of an older tape that was put back nothing is removed before it is known to be the run's."""
    with Pair(tmp_path / "run", config_of(learners=2, sync={"quorum": 2})) as pair:
        pair.join("a")
        for step in range(1, 21):
            pair.run(8)
            if step == 10 and is_restarted:
                pair.restart()
                pair.run(20)
            pair.syncer.contents, pair.syncer.commits_per_collect = CONTENTS, 1
            pair.syncer.buffers(Buffers("a", 1, step, 8 * step, save({"mean": np.float32([step, 0])})))
            pair.run(1)
            pair.syncer.tidy()
        state = pair.syncer.machine.state
        assert not state.merges and state.buffers["a"].step == 20
        there = pair.store.files
    assert len(there - state.files) == is_restarted


def test_an_export_takes_no_more_memory_the_more_names_have_given_buffers(tmp_path):
    size = 1 << 18
    contents = Contents(fixed=(Fixed("mean", "F32", (size,), "buffer"),))
    with Store.open(tmp_path) as store:
        begun(store, contents)
        for number in range(24):
            given(store, f"n{number:02}", 100, 1000.0, mean=np.full(size, number, np.float32))
    state = state_at(tmp_path)
    tracemalloc.start()
    found = of_learners(tmp_path, state)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.frombuffer(found["mean"], np.float32)[0] == 11.5
    assert peak < 16 * 4 * size, "of one learner's, and what a mean in float64 takes"


def test_files_of_those_without_merged_work_are_not_read(tmp_path, caplog):
    with Store.open(tmp_path) as store:
        begun(store)
        given(store, "worker", 100, 1000.0, mean=np.float32([1, 5]))
        given(store, "idle", 100, 1000.0, merged=0, mean=np.float32([9, 9]))
    (tmp_path / "files" / state_at(tmp_path).buffers["idle"].file).unlink()
    found = of_learners(tmp_path, state_at(tmp_path))
    assert np.frombuffer(found["mean"], np.float32).tolist() == [1, 5]
    assert not caplog.messages, "it is not missed"


def test_once_work_is_merged_nobody_without_any_has_a_say(tmp_path):
    """Neither where no worker has given buffers, nor by giving them so late that the workers' were long ago."""
    with Store.open(tmp_path) as store:
        begun(store)
        given(store, "worker", 100, 100.0, mean=np.float32([1, 5]))
        given(store, "liar", 100, 9000.0, merged=0, mean=np.float32([9, 9]))
    state = state_at(tmp_path)
    assert np.frombuffer(of_learners(tmp_path, state)["mean"], np.float32).tolist() == [1, 5]
    del state.buffers["worker"]
    assert of_learners(tmp_path, state) == {}
