"""A model splits into balanced fragments, each element exactly once, and reads back what was written."""

import itertools
from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.algo.fragments import (
    BLOCK,
    EVEN,
    ROW,
    Layout,
    Slot,
    Tensor,
    decode_fragments,
    decode_layout,
    encode_fragments,
    first_difference,
    fragment_count,
    fragments_max,
    fragments_wanted,
    gather,
    layout_of,
    padded,
    parts,
    scatter,
    split,
)

sizes = st.lists(st.integers(1, 3 * ROW), min_size=1, max_size=8)
shapes = st.lists(st.lists(st.integers(1, 40), max_size=4).map(tuple), min_size=1, max_size=6)
small = settings(deadline=None, max_examples=40, derandomize=True)


def vectors(extents: list[int]) -> Layout:
    return layout_of(Tensor(f"t{i}", (extent,)) for i, extent in enumerate(extents))


def layout_from(extents: list[tuple[int, ...]]) -> Layout:
    return layout_of(Tensor(f"t{i}", shape) for i, shape in enumerate(extents))


def drawn(layout: Layout) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {t.name: rng.standard_normal(t.shape, np.float32) for t in layout.tensors}


def evenness(fragments) -> float:
    """The largest fragment over the mean."""
    sizes = [fragment.size for fragment in fragments]
    return max(sizes) * len(sizes) / sum(sizes)


def pieces(fragments) -> Counter[str]:
    """In how many slots each tensor lies."""
    return Counter(slot.name for fragment in fragments for slot in fragment.slots)


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
        ([Tensor("a", (1,) * 65)], "a: has 65 dimensions, and at most 64 can be"),
        ([], "at least one tensor"),
    ],
)
def test_layouts_that_cannot_be_are_refused(tensors, complaint):
    with pytest.raises(ValueError) as refused:
        layout_of(tensors)
    assert complaint in str(refused.value)


def test_a_tensor_of_very_many_dimensions_is_refused_from_the_wire_too():
    of = b'{"tensors":[{"name":"a","shape":[%s],"kind":"other"}]}'
    assert decode_layout(of % b",".join([b"1"] * 64)).param_count == 1
    with pytest.raises(msgspec.ValidationError, match="a: has 300000 dimensions"):
        decode_layout(of % b",".join([b"1"] * 300_000))


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


def test_what_one_side_trains_and_the_other_has_frozen_is_not_called_missing():
    both, one = layout_of([Tensor("a", (3,)), Tensor("b", (2,))]), layout_of([Tensor("a", (3,))])
    assert first_difference(one, both, frozen_here={"b": b""}) == "b is frozen here, and trained there"
    assert first_difference(both, one, frozen_there={"b": b""}) == "b is trained here, and frozen there"
    assert first_difference(one, both, {"c": b""}, {"b": b""}) == "b is missing here"


@small
@given(sizes, st.integers(1, 12))
def test_without_cuts_every_tensor_lies_in_exactly_one_fragment_and_starts_at_a_block(extents, num_fragments):
    fragments = split(vectors(extents), num_fragments, cut=False)
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
    assert max(fragment.size for fragment in split(vectors(extents), num_fragments, cut=False)) <= best * 4 / 3


def test_paper_appendix_c_an_embedding_is_a_fragment_of_its_own_where_nothing_is_cut():
    layout = transformer(layers=24, width=64, vocabulary=4096)
    fragments = split(layout, 24, cut=False)
    embedding = [f for f in fragments if any(slot.kind == "embedding" for slot in f.slots)]
    others = [fragment for fragment in fragments if fragment not in embedding]
    assert len(embedding) == 1 and len(embedding[0].slots) == 1
    assert evenness(others) <= 4 / 3 < evenness(fragments)


def test_split_is_deterministic_and_ties_go_by_name_into_the_lowest_bin():
    layout = vectors([256, 256, 256, 256, 128])
    fragments = split(layout, 2)
    assert fragments == split(layout, 2)
    assert [[slot.name for slot in fragment.slots] for fragment in fragments] == [
        ["t0", "t2", "t4"],
        ["t1", "t3"],
    ]
    with pytest.raises(ValueError, match="num_fragments"):
        split(layout, -1)


@pytest.mark.parametrize(
    ("parameters", "count"),
    [(1, 6), (3_000_000, 6), (12 * 2**19 - 1, 6), (12 * 2**19, 12), (10_800_000, 12), (24 * 2**19, 24), (5e9, 24)],
)
def test_where_no_number_is_asked_for_it_follows_the_size_so_that_fragments_are_large(parameters, count):
    assert fragments_wanted(parameters, 0) == count
    assert fragments_wanted(parameters, 7) == 7, "a number that is asked for stands"


@pytest.mark.parametrize("cut", [True, False])
def test_by_size_too_there_are_no_more_fragments_than_a_model_can_be_split_into(cut):
    for layout in (vectors([100, 100, 100]), vectors([2**19] * 12), vectors([2**19] * 40)):
        expected = min(fragments_wanted(layout.param_count, 0), fragments_max(layout, cut))
        assert len(split(layout, 0, cut)) == fragment_count(layout, 0, cut) == expected


# ------------------------------------------------------------------------------------------ tensors that are cut


@small
@given(shapes, st.integers(1, 40))
def test_there_are_as_many_fragments_as_asked_for_and_every_element_lies_in_one_of_them(extents, num_fragments):
    layout = layout_from(extents)
    fragments = split(layout, num_fragments)
    assert len(fragments) == min(num_fragments, fragments_max(layout))
    seen = {tensor.name: np.zeros(tensor.size, np.int64) for tensor in layout.tensors}
    for fragment in fragments:
        assert fragment.slots
        for slot in fragment.slots:
            assert slot.size > 0
            seen[slot.name][slot.start : slot.start + slot.size] += 1
    assert all((count == 1).all() for count in seen.values())


@small
@given(shapes, st.integers(1, 40))
def test_what_is_gathered_from_any_cut_scatters_back_to_the_bit(extents, num_fragments):
    layout = layout_from(extents)
    arrays = drawn(layout)
    turned = {name: np.asarray(array, order="F") for name, array in arrays.items()}
    back = {name: np.full_like(array, np.nan) for name, array in arrays.items()}
    for fragment in decode_fragments(encode_fragments(split(layout, num_fragments)), layout):
        flat = gather(fragment, turned, out=np.full(fragment.size, np.nan, np.float32))
        assert np.count_nonzero(flat) == sum(slot.size for slot in fragment.slots)
        scatter(fragment, flat, back)
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 1500)), min_size=1, max_size=30),
    st.lists(st.integers(1, 200_000), max_size=10),
    st.integers(1, 64),
)
def test_fragments_of_64k_are_within_a_tenth_of_the_mean(matrices, runs, num_fragments):
    layout = layout_from([*matrices, *((run,) for run in runs)])
    count = min(num_fragments, max(1, layout.param_count // 65_536))
    fragments = split(layout, count)
    assert len(fragments) == count
    if layout.param_count >= 65_536:
        assert evenness(fragments) <= EVEN
    assert sum(pieces(fragments).values()) <= len(layout.tensors) + 2 * count  # at most two cuts a fragment


@pytest.mark.parametrize("count", [1, 5, 24, 100])
def test_a_large_embedding_is_cut_into_whole_rows_and_little_else_is(count):
    layout = transformer(layers=6, width=512, vocabulary=50_000)
    whole, fragments = split(layout, count, cut=False), split(layout, count)
    assert evenness(fragments) <= EVEN
    assert count < 24 or evenness(whole) > 10
    slots = [slot for fragment in fragments for slot in fragment.slots]
    assert all(slot.start % slot.shape[-1] == 0 for slot in slots)
    assert pieces(fragments)["embed.weight"] <= 1.1 * 25.6 / 44.5 * count + 1
    if count == 24:
        assert sum(n > 1 for n in pieces(fragments).values()) <= 5


def test_what_is_even_without_cuts_is_not_cut():
    layout = transformer(layers=8, width=256, vocabulary=256)
    assert evenness(split(layout, 4, cut=False)) < 1.05
    assert split(layout, 4) == split(layout, 4, cut=False)


def test_rows_that_are_large_against_a_fragment_are_cut_at_blocks():
    layout = layout_of([Tensor("experts", (2, 500, 4096)), Tensor("wide", (3, 10**6))])
    for fragment in (fragments := split(layout, 24)):
        for slot in fragment.slots:
            assert slot.start % (4096 if slot.name == "experts" else BLOCK) == 0
    assert evenness(fragments) <= EVEN


def test_a_model_of_fewer_blocks_than_fragments_has_a_fragment_a_block():
    layout = layout_of([Tensor("a", (300,)), Tensor("b", (2, 2))])
    fragments = split(layout, 24)
    assert [[(slot.name, slot.start, slot.size) for slot in f.slots] for f in fragments] == [
        [("a", 0, 128)],
        [("a", 128, 128)],
        [("a", 256, 44)],
        [("b", 0, 4)],
    ]


@given(st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple), st.data())
@small
def test_the_parts_of_a_slot_are_views_in_order_even_of_what_does_not_lie_together(shape, data):
    array = np.asfortranarray(np.arange(np.prod(shape)).reshape(shape))
    start = data.draw(st.integers(0, array.size - 1))
    stop = data.draw(st.integers(start + 1, array.size))
    slot = Slot("t", shape, "other", start, 640, stop - start)
    found = list(parts(slot, array))
    assert np.concatenate([part.ravel() for part, _ in found]).tolist() == list(range(start, stop))
    assert all(np.shares_memory(part, array) for part, _ in found)
    ends = [640, *(at.stop for _, at in found)]
    assert [at.start for _, at in found] == ends[:-1] and ends[-1] == 640 + slot.size
    assert len(found) <= 2 * len(shape) - 1


def test_what_is_gathered_scatters_back_and_padding_is_zero():
    layout = layout_of([Tensor("a", (3, 5)), Tensor("b", ()), Tensor("c", (ROW + 1,)), Tensor("d", (BLOCK,))])
    (fragment,) = split(layout, 1)
    arrays = drawn(layout)
    arrays["a"] = np.asfortranarray(arrays["a"])
    flat = gather(fragment, arrays, out=np.full(fragment.size, np.nan, np.float32))
    assert flat.dtype == np.float32 and np.count_nonzero(flat) == layout.param_count
    back = {name: np.empty_like(array) for name, array in arrays.items()}
    scatter(fragment, flat, back)
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)
    np.testing.assert_array_equal(gather(fragment, arrays), flat)


def test_gather_refuses_a_shape_that_would_only_broadcast():
    (fragment,) = split(layout_of([Tensor("a", (3, 5))]), 1)
    with pytest.raises(ValueError, match="a: shape"):
        gather(fragment, {"a": np.ones((1, 5), np.float32)})
    with pytest.raises(ValueError, match="a: shape"):
        scatter(fragment, np.ones(fragment.size, np.float32), {"a": np.ones((5, 3), np.float32)})


# ------------------------------------------------------------------------------------------ the table of a run


def test_a_table_gives_the_same_fragments_back():
    layout = transformer(layers=2, width=48, vocabulary=300)
    for count in (1, 2, 5, 50, 150):
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


def test_a_table_of_whole_tensors_means_what_it_meant_before_tensors_were_cut():
    layout = layout_of([Tensor("a", (3, 100)), Tensor("b", (5,), "embedding")])
    (fragment,) = decode_fragments(b'[[["a",0,300,0],["b",0,5,384]]]', layout)
    assert fragment.slots == (Slot("a", (3, 100), "other", 0, 0, 300), Slot("b", (5,), "embedding", 0, 384, 5))
    assert fragment.size == 512 and fragment.row_start.tolist() == [0, 384] and fragment.row_stop.tolist() == [384, 512]


def test_slices_may_lie_anywhere_as_long_as_each_element_lies_once():
    layout = Layout((Tensor("a", (3, 100)), Tensor("b", (2, 2))))
    table = [[("a", 70, 30, 0), ("b", 3, 1, BLOCK), ("a", 0, 70, 2 * BLOCK)], [("b", 0, 3, 0), ("a", 100, 200, BLOCK)]]
    fragments = decode_fragments(msgspec.json.encode(table), layout)
    arrays = {"a": np.arange(300, dtype=np.float32).reshape(3, 100), "b": np.ones((2, 2), np.float32)}
    assert gather(fragments[1], arrays)[BLOCK : BLOCK + 200].tolist() == list(range(100, 300))
    assert encode_fragments(fragments) == msgspec.json.encode(table)


A, B = ("a", 0, BLOCK, 0), ("b", 0, BLOCK, BLOCK)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ([[A]], "b: the fragment table holds 0 of its 128 elements"),
        ([[A, B], [("b", 0, BLOCK, 0)]], "b: elements 0 to 128 follow the first 128"),
        ([[A, B, ("c", 0, BLOCK, 2 * BLOCK)]], "c: is in the fragment table, but not in the layout"),
        ([[("a", 0, 100, 0), B]], "a: the fragment table holds 100 of its 128 elements"),
        ([[("a", 28, 100, 0), B]], "a: elements 28 to 128 follow the first 0"),
        ([[("a", 0, 100, 0), B], [("a", 99, 29, 0)]], "a: elements 99 to 128 follow the first 100"),
        ([[("a", 0, 100, 0), B], [("a", 101, 27, 0)]], "a: elements 101 to 128 follow the first 100"),
        ([[("a", 0, 256, 0), ("b", 0, BLOCK, 256)]], "a: the fragment table holds 256 of its 128 elements"),
        ([[A, B, ("a", BLOCK, 0, 2 * BLOCK)]], "a: elements 128 to 128 follow"),
        ([[A, B, ("a", BLOCK, -1, 2 * BLOCK)]], "a: elements 128 to 127 follow"),
        ([[("a", -128, 256, 0), ("b", 0, BLOCK, 256)]], "a: elements -128 to 128 follow the first 0"),
        ([[A, ("b", 0, BLOCK, 64)]], "do not lie end to end"),
        ([[A, ("b", 0, BLOCK, 3 * BLOCK)]], "do not lie end to end"),
        ([[A, B], []], "do not lie end to end"),
    ],
)
def test_a_table_of_another_model_or_that_nobody_can_follow_is_refused(table, words):
    layout = Layout((Tensor("a", (BLOCK,)), Tensor("b", (BLOCK,))))
    with pytest.raises(ValueError, match=words):
        decode_fragments(msgspec.json.encode(table), layout)
