"""A run's buffers: of learners that trained lately, the mean by tokens of floats, and the newest of everything else."""

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save

from skerry.algo.contents import Contents, Fixed
from skerry.algo.fragments import Tensor, layout_of
from skerry.config import Config
from skerry.core.facts import Buffered, Discarded, LifeStarted, Paused, Row, Seen
from skerry.core.state import state_of
from skerry.node.buffers import flaw_of
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
        begin(
            store, Config(), layout_of([Tensor("w", (3,))]), lambda f: np.zeros(f.size, np.float32), contents=CONTENTS
        )
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
        ({"mean": np.float32([1, 2, 3])}, "mean (F32 of shape (3,)) is no buffer of the run's model"),
        ({"count": np.int32(1)}, "count (I32 of shape ()) is no buffer of the run's model"),
        ({"base": np.float32([1, 2])}, "base (F32 of shape (2,)) is no buffer of the run's model"),
    ],
)
def test_what_is_no_buffer_of_the_run_is_refused(arrays, says):
    assert flaw_of(save({name: np.asarray(array) for name, array in arrays.items()}), CONTENTS) == says


def test_bytes_that_are_no_safetensors_and_infinite_bfloat16_are_refused():
    assert flaw_of(b"junk", CONTENTS).startswith("they cannot be read")
    head = b'{"rough":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}'
    head = len(head).to_bytes(8, "little") + head
    assert flaw_of(head + b"\x80\x3f", CONTENTS) == ""
    assert flaw_of(head + b"\x80\x7f", CONTENTS) == "rough holds values that are not finite"
