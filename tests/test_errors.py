"""Errors that users catch: one family, one line each, whole after a trip between processes."""

import pickle

import pytest

import skerry
from skerry import errors


def classes():
    found = [errors.SkerryError]
    for one in found:
        found += one.__subclasses__()
    return found


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__name__)
def test_an_error_survives_the_way_from_a_worker_to_its_parent(kind):
    words = ("it is closed", "closed") if kind is errors.RefusedError else ("it is closed",)
    back = pickle.loads(pickle.dumps(kind(*words)))
    assert type(back) is kind and str(back) == "it is closed" and back.__dict__ == kind(*words).__dict__


def test_each_is_local_or_remote():
    kinds = set(classes()) - {errors.SkerryError, errors.LocalError, errors.RemoteError}
    assert all(issubclass(kind, errors.LocalError) != issubclass(kind, errors.RemoteError) for kind in kinds)


def test_what_a_peer_says_is_shown_in_one_printable_line():
    for shown in (str(errors.ProtocolError("a\nb\x1b[2J")), str(skerry.RefusedError("a\nb\x1b[2J", "unfit"))):
        assert shown.isprintable() and "\\n" in shown
