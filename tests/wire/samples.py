"""Messages for tests that care how they travel, not what they say."""

from __future__ import annotations

from typing import Annotated, get_args, get_origin

import msgspec

from skerry.core.vocabulary import LearnerState, Refusal

PLAIN = {int: 0, float: 0.0, str: "", bytes: b"", bool: False, LearnerState: "training", Refusal: "full"}


def sample(kind, **given):
    """A message with zeros, or some legal word, for what a test does not care about."""
    fields = [field for field in msgspec.structs.fields(kind) if field.required]
    return kind(**({field.name: PLAIN.get(_bare(field.type), ()) for field in fields} | given))


def _bare(kind):
    """A type without its bounds."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind
