"""The digest of a float32 array, by which a copy of a version is known to be right.

Its words w are the array's bits as little-endian uint32, in rows of ROW; the last row may be shorter.

    row sum   s_r = Σ_j w_j · f_j                          mod 2⁶⁴, f_j = FACTORS[j], odd numbers of 32 bits
    digest    Σ_r mix(s_r + (r + 1) · GOLDEN)              mod 2⁶⁴, 8 bytes, little-endian

Every sum is one of integers, so any order, any number of threads and a GPU give the same bits, and a row's sum can be
taken while the row is in cache for another reason. A single word that differs always shows. It finds damage, and does
not keep out liars: who wants to can make two arrays of one digest.
"""

import numpy as np
import numpy.typing as npt

from skerry.algo import kernels
from skerry.algo.fragments import F32, ROW
from skerry.algo.kernels import check_flat, frozen, over_rows

DIGEST_BYTES = 8


def digest(x: F32, threads: int = 1) -> bytes:
    check_flat(x.size, x)
    sums: list[int] = []  # appended to from any thread

    def work(row_lo: int, row_hi: int) -> None:
        sums.append(int(kernels.digest_of_rows(frozen(x), FACTORS, row_lo, row_hi)))

    over_rows(work, -(-x.size // ROW), threads)
    return as_bytes(sum(sums))


def of_row_sums(sums: npt.NDArray[np.uint64]) -> bytes:
    """The digest of an array of which somebody else has the row sums, all of them."""
    rows = np.arange(1, sums.size + 1, dtype=np.uint64)
    return as_bytes(int(kernels.mix(sums + rows * kernels.GOLDEN).sum(dtype=np.uint64)))


def as_bytes(total: int) -> bytes:
    """A sum of mixed rows as it is written down."""
    return (total % 2**64).to_bytes(DIGEST_BYTES, "little")


def _factors() -> npt.NDArray[np.uint32]:
    """f_j: the upper half of the j-th number that splitmix64 gives from seed 0, made odd."""
    numbers: npt.NDArray[np.uint64] = kernels.mix(np.arange(1, ROW + 1, dtype=np.uint64) * kernels.GOLDEN)
    return (numbers >> np.uint64(32)).astype(np.uint32) | np.uint32(1)


FACTORS = frozen(_factors())
