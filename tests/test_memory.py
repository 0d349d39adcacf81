"""Memory is used again when nothing refers to it, and not before."""

import gc
import threading

import numpy as np
import pytest

from skerry.memory import Arrays

SIZE = 1000


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def test_what_nobody_refers_to_is_used_again():
    arrays = Arrays()
    first = arrays.take(SIZE, np.float32)
    assert first.dtype == np.float32 and first.shape == (SIZE,) and first.flags.writeable
    where = address(first)
    second = arrays.take(SIZE, np.float32)
    assert address(second) != where
    del first
    assert address(arrays.take(SIZE, np.float32)) == where


def test_memory_is_for_any_type():
    arrays = Arrays()
    where = address(arrays.take(4 * SIZE, np.uint8))
    assert address(arrays.take(SIZE, np.float32)) == where


@pytest.mark.parametrize(
    "hold",
    [
        lambda array: array,
        lambda array: array[10:20],
        lambda array: array[10:20][2:3],
        lambda array: array.view(np.uint8),
        lambda array: array.reshape(10, 100)[3],
        lambda array: array.data,
        lambda array: array.data.cast("B"),
        lambda array: array.data.cast("B")[40:44],
        lambda array: np.frombuffer(array.data.cast("B"), np.uint8)[4:],
    ],
)
def test_what_anybody_can_still_read_is_left_alone(hold):
    arrays = Arrays()
    first = arrays.take(SIZE, np.float32)
    first[:] = np.arange(SIZE)
    where, held = address(first), hold(first)
    expected = bytes(held)
    del first
    gc.collect()
    others = [arrays.take(SIZE, np.float32) for _ in range(3)]
    for other in others:
        other[:] = -1
    assert where not in map(address, others) and bytes(held) == expected
    del held
    assert address(arrays.take(SIZE, np.float32)) == where


def test_fragments_of_nearly_one_size_share_and_others_are_forgotten():
    arrays = Arrays()
    where = address(arrays.take(SIZE, np.float32))
    assert address(arrays.take(SIZE + SIZE // 10, np.float32)) == where
    assert address(arrays.take(SIZE - SIZE // 10, np.float32)) == where
    arrays.take(3 * SIZE, np.float32)
    assert len(arrays._free) == 1


def test_no_more_lies_free_than_is_allowed():
    arrays = Arrays(free_max=2)
    held = [arrays.take(SIZE, np.float32) for _ in range(5)]
    del held
    assert len(arrays._free) == 2


def test_threads_never_share():
    arrays, errors = Arrays(), []

    def work(mark: int) -> None:
        for _ in range(300):
            array = arrays.take(SIZE, np.float32)
            array[:] = mark
            if not (array == mark).all():
                errors.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(arrays._free) <= 2 * len(threads)  # each takes one before it lets go of the last
