"""Where a model is computed: the device that somebody names, or the one that a learner would take."""

from __future__ import annotations

import torch

from skerry.errors import Refusal


def device_of(named: str | None) -> str:
    """The named device, else the GPU if there is one, else the CPU; refused if nothing can be computed there."""
    device = named or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise Refusal(f"--device {device}: {str(error).splitlines()[0]}") from None
    return device
