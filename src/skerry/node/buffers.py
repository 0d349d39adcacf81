"""What a learner's buffers must be before a run keeps them: some of the run's own, in the same form, and finite.

They come by value, not as drift: a running variance that is rounded, or changed by a late drift, could become negative.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize

from skerry.algo.contents import Contents

_FLOATS: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


def flaw_of(data: bytes, contents: Contents) -> str:
    """What is wrong with a learner's buffers; empty if nothing is."""
    known = {fixed.name: (fixed.dtype, fixed.shape) for fixed in contents.fixed if fixed.kind == "buffer"}
    try:
        tensors = deserialize(data)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        return f"they cannot be read ({error})"
    for name, about in tensors:
        if known.get(name) != (about["dtype"], tuple(about["shape"])):
            return f"{name} ({about['dtype']} of shape {tuple(about['shape'])}) is no buffer of the run's model"
        if not _is_finite(about["dtype"], bytes(about["data"])):
            return f"{name} holds values that are not finite"
    return ""


def _is_finite(dtype: str, data: bytes) -> bool:
    if dtype == "BF16":  # all bits of the exponent are set in what is not
        return not ((np.frombuffer(data, np.uint16) & 0x7F80) == 0x7F80).any()
    return dtype not in _FLOATS or bool(np.isfinite(np.frombuffer(data, _FLOATS[dtype])).all())
