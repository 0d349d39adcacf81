"""A model splits into balanced fragments, each tensor exactly once, and reads back what was written."""

import itertools
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.algo.fragments import (
    BLOCK,
    ROW,
    Layout,
    Tensor,
    decode_fragments,
    encode_fragments,
    first_difference,
    gather,
    layout_of,
    padded,
    scatter,
    split,
)

sizes = st.lists(st.integers(1, 3 * ROW), min_size=1, max_size=8)
small = settings(deadline=None, max_examples=40, derandomize=True)


def vectors(extents: list[int]) -> Layout:
    return layout_of(Tensor(f"t{i}", (extent,)) for i, extent in enumerate(extents))


def transformer(layers: int, width: int, vocabulary: int) -> Layout:
    tensors = [Tensor("embed.weight", (vocabulary, width), "embedding"), Tensor("norm.weight", (width,))]
    for i in range(layers):
        tensors += [
            Tensor(f"blocks.{i}.qkv.weight", (3 * width, width)),
            Tensor(f"blocks.{i}.proj.weight", (width, width)),
            Tensor(f"blocks.{i}.up.weight", (4 * width, width)),
            Tensor(f"blocks.{i}.down.weight", (width, 4 * width)),
            Tensor(f"blocks.{i}.norm.weight", (width,)),
        ]
    return layout_of(tensors)


def test_a_layout_is_sorted_by_name_whatever_the_order_given():
    tensors = [Tensor("b", (2,)), Tensor("a", (3, 4), "embedding"), Tensor("c", ())]
    layouts = {layout_of(order) for order in itertools.permutations(tensors)}
    assert len(layouts) == 1
    (layout,) = layouts
    assert [tensor.name for tensor in layout.tensors] == ["a", "b", "c"]
    assert layout.param_count == 12 + 2 + 1
    assert len(layout.digest) == 64


def test_digest_tells_every_difference_and_survives_the_wire():
    layout = layout_of([Tensor("a", (3, 4)), Tensor("b", (2,))])
    others = [
        layout_of([Tensor("a", (4, 3)), Tensor("b", (2,))]),
        layout_of([Tensor("a", (3, 4), "embedding"), Tensor("b", (2,))]),
        layout_of([Tensor("a", (3, 4)), Tensor("c", (2,))]),
        layout_of([Tensor("a", (3, 4))]),
    ]
    assert len({layout.digest, *(other.digest for other in others)}) == 5
    sent = msgspec.json.decode(msgspec.json.encode(layout), type=Layout)
    assert sent == layout and sent.digest == layout.digest


@pytest.mark.parametrize(
    "tensors, complaint",
    [
        ([Tensor("a", (2,)), Tensor("a", (3,))], "a: named twice"),
        ([Tensor("a", (2, 0))], "a: shape (2, 0) has no elements"),
        ([Tensor("a", (-1, -2))], "a: shape (-1, -2) has no elements"),
        ([], "at least one tensor"),
    ],
)
def test_layouts_that_cannot_be_are_refused(tensors, complaint):
    with pytest.raises(ValueError) as refused:
        layout_of(tensors)
    assert complaint in str(refused.value)


def test_an_unsorted_layout_from_the_wire_is_refused():
    unsorted = b'{"tensors":[{"name":"b","shape":[1],"kind":"other"},{"name":"a","shape":[1],"kind":"other"}]}'
    with pytest.raises(msgspec.ValidationError, match="a: out of name order"):
        msgspec.json.decode(unsorted, type=Layout)


def test_first_difference_names_the_first_differing_parameter():
    ours = layout_of([Tensor("a", (3, 4)), Tensor("b", (2,)), Tensor("c", (5,))])

    def phrase(*tensors: Tensor) -> str | None:
        return first_difference(ours, layout_of(tensors))

    a, b, c = ours.tensors
    assert phrase(a, b, c) is None
    assert phrase(Tensor("a", (3, 5)), b) == "a: shape (3, 4) here, (3, 5) there"
    assert phrase(a, Tensor("b", (2,), "embedding"), c) == "b: kind other here, embedding there"
    assert phrase(a, c) == "b is missing there"
    assert phrase(a, Tensor("aa", (1,)), b, c) == "aa is missing here"


@small
@given(sizes, st.integers(1, 12))
def test_every_tensor_lies_in_exactly_one_fragment_and_starts_at_a_block(extents, num_fragments):
    fragments = split(vectors(extents), num_fragments)
    assert len(fragments) == min(num_fragments, len(extents))
    assert [fragment.index for fragment in fragments] == list(range(len(fragments)))
    names = [slot.name for fragment in fragments for slot in fragment.slots]
    assert sorted(names) == sorted(f"t{i}" for i in range(len(extents)))
    for fragment in fragments:
        assert [slot.name for slot in fragment.slots] == sorted(slot.name for slot in fragment.slots)
        end = 0
        for slot in fragment.slots:
            assert slot.offset == end and slot.offset % BLOCK == 0
            end = slot.padded_stop
        assert fragment.size == end


@small
@given(sizes, st.integers(1, 3))
def test_rows_tile_the_fragment_without_crossing_tensors(extents, num_fragments):
    for fragment in split(vectors(extents), num_fragments):
        starts, stops = fragment.row_start, fragment.row_stop
        assert starts[0] == 0 and stops[-1] == fragment.size and (starts[1:] == stops[:-1]).all()
        assert ((stops - starts > 0) & (stops - starts <= ROW) & (starts % BLOCK == 0)).all()
        for start, stop, slot in zip(starts, stops, fragment.row_slot, strict=True):
            assert fragment.slots[slot].offset <= start < stop <= fragment.slots[slot].padded_stop


@small
@given(sizes, st.integers(1, 3))
def test_paper_appendix_c_largest_fragment_is_within_four_thirds_of_the_best_split(extents, num_fragments):
    loads = [padded(extent) for extent in extents]
    bins = min(num_fragments, len(loads))

    def largest(choice: tuple[int, ...]) -> int:
        return max(sum(load for load, at in zip(loads, choice, strict=True) if at == b) for b in range(bins))

    best = min(largest(choice) for choice in itertools.product(range(bins), repeat=len(loads)))
    assert max(fragment.size for fragment in split(vectors(extents), num_fragments)) <= best * 4 / 3


def test_paper_appendix_c_a_transformer_splits_evenly_beside_its_embedding():
    layout = transformer(layers=24, width=64, vocabulary=4096)
    fragments = split(layout, 24)
    embedding = [f for f in fragments if any(slot.kind == "embedding" for slot in f.slots)]
    others = [fragment.size for fragment in fragments if fragment not in embedding]
    assert len(embedding) == 1 and len(embedding[0].slots) == 1  # alone in its own, much larger fragment
    assert max(others) <= 4 / 3 * math.fsum(others) / len(others)


def test_split_is_deterministic_and_ties_go_by_name_into_the_lowest_bin():
    layout = vectors([256, 256, 256, 256, 128])
    fragments = split(layout, 2)
    assert fragments == split(layout, 2)
    assert [[slot.name for slot in fragment.slots] for fragment in fragments] == [
        ["t0", "t2", "t4"],
        ["t1", "t3"],
    ]
    with pytest.raises(ValueError, match="num_fragments"):
        split(layout, 0)


def test_what_is_gathered_scatters_back_and_padding_is_zero():
    layout = layout_of([Tensor("a", (3, 5)), Tensor("b", ()), Tensor("c", (ROW + 1,)), Tensor("d", (BLOCK,))])
    (fragment,) = split(layout, 1)
    rng = np.random.default_rng(0)
    arrays = {t.name: rng.standard_normal(t.shape, np.float32) for t in layout.tensors}
    arrays["a"] = np.asfortranarray(arrays["a"])
    flat = gather(fragment, arrays, out=np.full(fragment.size, np.nan, np.float32))
    assert flat.dtype == np.float32 and np.count_nonzero(flat) == layout.param_count
    back = scatter(fragment, flat)
    for name, array in arrays.items():
        assert back[name].shape == array.shape and np.shares_memory(back[name], flat)
        np.testing.assert_array_equal(back[name], array)
    np.testing.assert_array_equal(gather(fragment, arrays), flat)


def test_gather_refuses_a_shape_that_would_only_broadcast():
    (fragment,) = split(layout_of([Tensor("a", (3, 5))]), 1)
    with pytest.raises(ValueError, match="a: shape"):
        gather(fragment, {"a": np.ones((1, 5), np.float32)})


# ------------------------------------------------------------------------------------------ the table of a run


def test_a_table_gives_the_same_fragments_back():
    layout = transformer(layers=2, width=48, vocabulary=300)
    for count in (1, 2, 5, 50):
        fragments = split(layout, count)
        again = decode_fragments(encode_fragments(fragments), layout)
        assert again == fragments
        for ours, theirs in zip(fragments, again, strict=True):
            for name in ("row_start", "row_stop", "row_slot"):
                np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))


def test_a_table_is_believed_whatever_way_it_was_split():
    """So that a run which has begun goes on when `split` has learned another way."""
    one, two = (Tensor(name, (BLOCK,)) for name in "ab")
    table = msgspec.json.encode([[("b", 0, BLOCK, 0), ("a", 0, BLOCK, BLOCK)]])
    (fragment,) = decode_fragments(table, Layout((one, two)))
    assert [(slot.name, slot.offset) for slot in fragment.slots] == [("b", 0), ("a", BLOCK)]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ([[("a", 0, BLOCK, 0)]], "every tensor of the layout once"),
        ([[("a", 0, BLOCK, 0), ("b", 0, BLOCK, BLOCK)], [("b", 0, BLOCK, 0)]], "every tensor of the layout once"),
        ([[("a", 0, BLOCK, 0), ("c", 0, BLOCK, BLOCK)]], "every tensor of the layout once"),
        ([[("a", 0, 100, 0), ("b", 0, BLOCK, BLOCK)]], "a: elements 0 to 100 of 128"),
        ([[("a", 28, 100, 0), ("b", 0, BLOCK, BLOCK)]], "a: elements 28 to 128 of 128"),
        ([[("a", 0, BLOCK, 0), ("b", 0, BLOCK, 64)]], "do not lie end to end"),
        ([[("a", 0, BLOCK, 0), ("b", 0, BLOCK, BLOCK)], []], "do not lie end to end"),
    ],
)
def test_a_table_of_another_model_or_that_nobody_can_follow_is_refused(table, words):
    layout = Layout((Tensor("a", (BLOCK,)), Tensor("b", (BLOCK,))))
    with pytest.raises(ValueError, match=words):
        decode_fragments(msgspec.json.encode(table), layout)
