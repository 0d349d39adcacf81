"""The handshake without a socket: who is welcome, who is not, and that no proof stands in for another."""

import pytest

from skerry.errors import ProtocolError, WireError
from skerry.wire import handshake
from skerry.wire.frames import Attach, Attached, Challenge, Instruct, Proof
from skerry.wire.handshake import Credentials

SYNCER_NONCE, LEARNER_NONCE, SESSION = b"s" * 32, b"l" * 32, b"i" * 16


def shake(syncer, learner, session=b""):
    """What a syncer and a learner say to each other, up to the syncer's verdict."""
    heard = handshake.challenge(syncer, SYNCER_NONCE)
    said = handshake.answer(learner, LEARNER_NONCE, heard, session)
    denied = handshake.refusal(syncer, SYNCER_NONCE, said)
    assert denied is None or denied.final
    return said, denied and denied.reason


def check(mine, heard, session=b""):
    handshake.check_welcome(mine, LEARNER_NONCE, SYNCER_NONCE, heard, session)


@pytest.mark.parametrize("token", [None, b"right"])
@pytest.mark.parametrize(("session", "kind"), [(b"", Proof), (SESSION, Attach)])
def test_two_that_hold_the_same_find_each_other(token, session, kind):
    mine = Credentials(token, 1)
    said, refusal = shake(mine, mine, session)
    assert isinstance(said, kind) and refusal is None
    check(mine, handshake.welcome(mine, SYNCER_NONCE, said, SESSION), session)


@pytest.mark.parametrize(
    ("syncer", "learner", "words"),
    [
        (Credentials(b"right", 1), Credentials(b"wrong", 1), "wrong token"),
        (Credentials(b"right", 1), Credentials(None, 1), "requires a token: name a copy of its file as token_file"),
        (Credentials(None, 1), Credentials(b"right", 1), "has no token"),
    ],
)
def test_a_refusal_says_what_to_do(syncer, learner, words):
    _, refusal = shake(syncer, learner)
    assert refusal is not None and words in refusal and "\n" not in refusal


@pytest.mark.parametrize(("syncer", "learner"), [(1, 2), (2, 1)])
def test_who_speaks_another_protocol_is_told_both_before_it_says_anything(syncer, learner):
    heard = handshake.challenge(Credentials(b"right", syncer), SYNCER_NONCE)
    differs = handshake.disagreement(Credentials(b"wrong", learner), heard)
    assert differs == f"the syncer speaks protocol {syncer} and the learner {learner}: upgrade the older"
    assert not handshake.disagreement(Credentials(b"wrong", syncer), heard)


def test_the_handshake_has_a_number_of_its_own_that_stays():
    """Builds of 0.2 stop dialling for good where it is another; they know of no other number in a challenge."""
    for protocol in (2, 3):
        heard = handshake.challenge(Credentials(None, protocol), SYNCER_NONCE)
        said = handshake.answer(Credentials(None, protocol), LEARNER_NONCE, heard, b"")
        assert (heard.protocol, said.protocol) == (2, 2)
    assert Challenge(2, SYNCER_NONCE, False).speaks == 2, "what a syncer of 0.2 speaks, which does not say so"
    for other in (1, 3):
        assert handshake.disagreement(Credentials(None, 2), Challenge(other, SYNCER_NONCE, False))
        denied = handshake.refusal(Credentials(b"right", 2), SYNCER_NONCE, Proof(other, LEARNER_NONCE, b""))
        assert f"protocol 2 and the learner {other}" in denied.reason and not denied.final


def test_a_proof_holds_for_its_own_nonces_session_and_kind_only():
    mine = Credentials(b"right", 1)
    proof, _ = shake(mine, mine)
    attach, _ = shake(mine, mine, SESSION)
    assert handshake.refusal(mine, b"t" * 32, proof)
    for forged in (
        Proof(2, b"m" * 32, proof.mac),
        Proof(2, LEARNER_NONCE, attach.mac),
        Attach(2, LEARNER_NONCE, b"", proof.mac),
        Attach(2, LEARNER_NONCE, SESSION, proof.mac),
        Attach(2, LEARNER_NONCE, b"j" * 16, attach.mac),
    ):
        assert handshake.refusal(mine, SYNCER_NONCE, forged)


def test_a_learners_own_words_are_no_welcome():
    mine = Credentials(b"right", 1)
    for session in (b"", SESSION):
        said, _ = shake(mine, mine, session)
        with pytest.raises(ProtocolError, match="does not hold the token"):
            check(mine, Attached(SESSION, said.mac), session)


def test_a_welcome_is_checked():
    mine = Credentials(b"right", 1)
    said, _ = shake(mine, mine, SESSION)
    for syncer in (Credentials(b"wrong", 1), Credentials(None, 1)):
        with pytest.raises(ProtocolError, match="does not hold the token"):
            check(mine, handshake.welcome(syncer, SYNCER_NONCE, said, SESSION), SESSION)
    with pytest.raises(ProtocolError, match="another session"):
        check(mine, handshake.welcome(mine, SYNCER_NONCE, said, b"j" * 16), SESSION)


def test_short_nonces_break_the_protocol():
    mine = Credentials(None, 1)
    with pytest.raises(ProtocolError, match="nonce of 0 bytes"):
        handshake.refusal(mine, SYNCER_NONCE, Proof(2, b"", b""))
    with pytest.raises(ProtocolError, match="nonce of 3 bytes"):
        handshake.answer(mine, LEARNER_NONCE, Challenge(2, b"abc", False), b"")


def test_an_empty_token_is_none_at_all_and_a_token_is_never_shown():
    with pytest.raises(WireError, match="empty"):
        Credentials(b" \n", 1)
    assert "right" not in repr(Credentials(b"right", 1))


def test_an_order_is_proved_as_a_whole_and_by_the_admins_token_alone():
    admin, learner = Credentials(b"admin", 1), Credentials(b"learner", 1)
    heard = handshake.challenge(learner, SYNCER_NONCE)
    said = handshake.instruction(admin, LEARNER_NONCE, heard, b"order")
    assert handshake.refusal(admin, SYNCER_NONCE, said) is None
    for wrong in (
        handshake.instruction(learner, LEARNER_NONCE, heard, b"order"),
        Instruct(said.protocol, said.nonce, said.mac, b"other"),  # another on the way
        Instruct(said.protocol, b"x" * 32, said.mac, b"order"),
        Instruct(said.protocol, said.nonce, b"", b"order"),
        Instruct(said.protocol, said.nonce, handshake.inquiry(admin, LEARNER_NONCE, heard).mac, b""),
    ):
        denied = handshake.refusal(admin, SYNCER_NONCE, wrong)
        assert denied is not None and denied.final and "the learners' token gives no order" in denied.reason
    assert handshake.refusal(admin, b"z" * 32, said) is not None, "it was said before, to another challenge"
