"""The kernels of a learner on torch tensors, with the bits of `algo/`: codecs, and the row sums of a digest.

Rules that hold here, so that a learner whose state is on a device says and holds what any other would:
- every product is rounded before it is added: an operation of torch is one kernel, and none here has both;
- a number to divide by is on the device: CUDA divides by one on the host as if by its inverse, off by the last bit;
- sums are of integers, or float64 in the order of `algo.kernels`;
- nothing is looked at, so nothing waits for the device, and work is in few calls, each over many elements: the
  training loop waits for the interpreter while one is made.
A NaN's own bits are the processor's, not ours. No tensor that is handed in is changed but the one named to be filled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import SupportsFloat

import torch
from torch import Tensor

from skerry.algo import codecs, kernels
from skerry.algo.digests import FACTORS
from skerry.algo.fragments import BLOCK, ROW

PIECE = 1 << 24  # elements that are worked on at once, whole rows: each takes 8 bytes on the way, 20 in bf16 and int2
WORD = 0xFFFFFFFF
SIGN_OFF, INFINITY_BITS = int(kernels.SIGN_OFF), int(kernels.INFINITY_BITS)
SCALE_MIN, ROUNDER = float(kernels.SCALE_MIN), float(kernels.ROUNDER)
HALF, QUARTER = BLOCK // 2, BLOCK // 4


def encode(codec: str, x: Tensor, payload: Tensor) -> None:
    """Fill the payload of x, as `codecs.encode` does."""
    _check_length(codec, payload, x.numel())
    for at in _pieces(x.numel()):
        _ENCODERS[codec](_blocks(x[at]), *_places(codec, payload, x.numel(), at))


def decode(codec: str, payload: Tensor, out: Tensor) -> None:
    """Fill in what a payload says, as `codecs.decode` does."""
    _check_length(codec, payload, out.numel())
    for at in _pieces(out.numel()):
        _DECODERS[codec](*_places(codec, payload, out.numel(), at), _blocks(out[at]))


def row_sums(x: Tensor, factors: Tensor) -> Tensor:
    """The row sums of a digest (`algo/digests.py`), as the int64 of the same bits; int64 wraps around like uint64."""
    sums = [_sums(x[at], factors) for at in _pieces(x.numel())]
    return sums[0] if len(sums) == 1 else torch.cat(sums)


def factors_on(device: torch.device) -> Tensor:
    """A digest's factors, as `row_sums` takes them."""
    return torch.tensor(FACTORS.astype("int64"), device=device)


def largest(x: Tensor) -> Tensor:
    """The largest magnitude: infinite or NaN if any element is."""
    top: Tensor = torch.linalg.vector_norm(x, math.inf)
    return top


def _check_length(codec: str, payload: Tensor, size: int) -> None:
    expected = codecs.payload_bytes(codec, size)
    if payload.numel() != expected:
        raise ValueError(f"{codec} payload of {size} elements must be of {expected} bytes, not {payload.numel()}")


def _pieces(size: int) -> Iterator[slice]:
    for start in range(0, size, PIECE):
        yield slice(start, min(start + PIECE, size))


def _blocks(x: Tensor) -> Tensor:
    return x.view(-1, BLOCK)


def _places(codec: str, payload: Tensor, size: int, at: slice) -> tuple[Tensor, Tensor]:
    """Where the scales of these elements are in a payload, and their codes, each a row for a block."""
    rows, count = slice(at.start // BLOCK, at.stop // BLOCK), size // BLOCK
    scale_bytes = 0 if codec in ("fp32", "bf16") else 4 * count
    scales, codes = payload[:scale_bytes].view(torch.float32), payload[scale_bytes:].view(count, -1)
    return scales[rows], codes[rows]


def _number(value: SupportsFloat, like: Tensor) -> Tensor:
    return torch.full((), float(value), dtype=like.dtype, device=like.device)


# Encoders take blocks and fill scales and codes; decoders take these and fill blocks. Each is what the function of the
# same name in `algo.kernels` does.


def _encode_fp32(blocks: Tensor, scales: Tensor, codes: Tensor) -> None:
    codes.view(torch.float32).copy_(blocks)


def _decode_fp32(scales: Tensor, codes: Tensor, out: Tensor) -> None:
    out.copy_(codes.view(torch.float32))


def _encode_bf16(blocks: Tensor, scales: Tensor, codes: Tensor) -> None:
    """By their bits: a conversion would make every NaN the same, and on every device another."""
    bits = blocks.view(torch.int32)
    upper = bits >> 16
    rounded = (upper & 1).add_(bits).add_(0x7FFF).bitwise_right_shift_(16)
    is_nan = (bits & SIGN_OFF) > INFINITY_BITS
    codes.view(torch.int16).copy_(torch.where(is_nan, upper | 0x40, rounded))


def _decode_bf16(scales: Tensor, codes: Tensor, out: Tensor) -> None:
    out.view(torch.int32).copy_(codes.view(torch.int16)).bitwise_left_shift_(16)


def _encode_int8(blocks: Tensor, scales: Tensor, codes: Tensor) -> None:
    codes.copy_(_rounded(blocks, scales, levels=127, zero=0))


def _decode_int8(scales: Tensor, codes: Tensor, out: Tensor) -> None:
    out.copy_(codes.view(torch.int8)).mul_(scales[:, None])


def _encode_int4(blocks: Tensor, scales: Tensor, codes: Tensor) -> None:
    halves = _rounded(blocks, scales, levels=7, zero=8)
    torch.add(halves[:, :HALF], halves[:, HALF:], alpha=16, out=codes)


def _decode_int4(scales: Tensor, codes: Tensor, out: Tensor) -> None:
    out[:, :HALF] = codes & 15
    out[:, HALF:] = codes >> 4
    out.sub_(8.0).mul_(scales[:, None])


def _rounded(blocks: Tensor, scales: Tensor, levels: int, zero: int) -> Tensor:
    """round(x / scale) + zero, the lowest byte of it; fills in the scales, max|x| / levels."""
    inverse, is_spoiled = _scale(blocks, scales, levels)
    shifted = (blocks * inverse[:, None]).add_(ROUNDER + zero)  # its bits are ROUNDER's, and the integer below them
    shifted.masked_fill_(is_spoiled[:, None], ROUNDER + zero)
    return shifted.view(torch.int32).to(torch.uint8)


def _scale(blocks: Tensor, scales: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Fill in the scale of each block; 1 / scale, or 0 where no scale will do, and whether it is because of a NaN."""
    top = torch.linalg.vector_norm(blocks, math.inf, dim=1)
    is_spoiled = (top < math.inf).logical_not_()
    torch.div(top, _number(levels, top), out=scales)
    scales.masked_fill_(scales < SCALE_MIN, 0.0).masked_fill_(is_spoiled, math.nan)
    inverse = scales.reciprocal()
    return inverse.masked_fill_(inverse == math.inf, 0.0), is_spoiled


def _encode_int2(blocks: Tensor, scales: Tensor, codes: Tensor) -> None:
    count = blocks.count_nonzero(dim=1)
    rms = _rms(blocks, count)
    has_zero = count < BLOCK
    scales.copy_(torch.where(has_zero & (rms > 0), -rms, rms))
    middle = rms * torch.where(has_zero, _number(kernels.MIDDLE_OF_3, rms), _number(kernels.MIDDLE, rms))
    large = (blocks.abs() >= middle[:, None]).to(torch.uint8)
    each = large.add_((blocks < 0).to(torch.uint8), alpha=2).mul_((rms > 0)[:, None]).view(-1, 4, QUARTER)
    torch.add(each[:, 0], each[:, 1], alpha=4, out=codes)
    codes.add_(each[:, 2], alpha=16).add_(each[:, 3], alpha=64)


def _decode_int2(scales: Tensor, codes: Tensor, out: Tensor) -> None:
    has_zero = scales < 0
    size = torch.where(has_zero, -scales, scales)
    low = size * torch.where(has_zero, _number(0, size), _number(kernels.LOW, size))
    high = size * torch.where(has_zero, _number(kernels.HIGH_OF_3, size), _number(kernels.HIGH, size))
    each = torch.stack([codes, codes >> 2, codes >> 4, codes >> 6], dim=1).view(-1, BLOCK)
    torch.where((each & 1).bool(), high[:, None], low[:, None], out=out)
    torch.where((each & 2).bool(), -out, out, out=out)


def _rms(blocks: Tensor, count: Tensor) -> Tensor:
    """Of the values that are not zero, of which there are so many; NaN if one is not finite, 0 if it has no scale."""
    squares = blocks.double().square_()
    lanes = (squares[:, :HALF] + squares[:, HALF:]).t().contiguous()
    total = lanes[0].clone()
    for lane in lanes[1:]:  # one by one: a sum in any other order has other bits
        total += lane
    rms = total.div_(count.clamp_min(1)).sqrt_().float()
    return rms.masked_fill_(rms < SCALE_MIN, 0.0).masked_fill_((rms < math.inf).logical_not_(), math.nan)


def _sums(x: Tensor, factors: Tensor) -> Tensor:
    words = x.view(torch.int32).to(torch.int64).bitwise_and_(WORD)
    whole = words.numel() // ROW * ROW
    rows, rest = words[:whole].view(-1, ROW), words[whole:]
    sums = rows.mul_(factors).sum(dim=1)
    if not rest.numel():
        return sums
    return torch.cat([sums, rest.mul_(factors[: rest.numel()]).sum(dim=0, keepdim=True)])


_Coder = Callable[[Tensor, Tensor, Tensor], None]
_ENCODERS: dict[str, _Coder] = {
    "fp32": _encode_fp32,
    "bf16": _encode_bf16,
    "int8": _encode_int8,
    "int4": _encode_int4,
    "int2": _encode_int2,
}
_DECODERS: dict[str, _Coder] = {
    "fp32": _decode_fp32,
    "bf16": _decode_bf16,
    "int8": _decode_int8,
    "int4": _decode_int4,
    "int2": _decode_int2,
}
