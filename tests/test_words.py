"""Words that operators are shown are explained where they look."""

from pathlib import Path
from typing import get_args

from skerry.core.vocabulary import Flaw, Refusal

PAGE = Path(__file__).parent.parent / "docs/OPERATING.md"


def test_every_reason_for_a_refused_contribution_is_explained():
    words = {word for word in get_args(Refusal) if isinstance(word, str)} | set(get_args(Flaw))
    text = PAGE.read_text()
    assert len(words) > 10 and not [word for word in words if f"`{word}`" not in text]
