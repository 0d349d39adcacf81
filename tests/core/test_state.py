"""What a record of a tape says, and which runs are nobody's to read here."""

import msgspec
import pytest

from core.hand import Desk
from skerry.core.facts import RULES
from skerry.core.state import decode_fact, fold
from skerry.errors import TapeUnknown


@pytest.mark.parametrize("is_fold", [False, True])
def test_a_run_that_follows_later_rules_is_refused_in_one_line(is_fold):
    created = decode_fact(Desk().tape[0])
    later = msgspec.structs.replace(created, rules=RULES + 1)
    record = msgspec.msgpack.encode(fold([later]) if is_fold else later)
    with pytest.raises(TapeUnknown) as caught:
        decode_fact(record)
    assert str(caught.value) == (
        f"run run follows rules {RULES + 1}, rules {RULES} are known here: use a later version of Skerry"
    )
