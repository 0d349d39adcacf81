"""TLS 1.3 for every connection of the wire: who may speak to whom, and the words for why not.

A key file (docs/KEYS.md) makes a `Tls`: a learner's dials and believes only who shows the run's syncer's certificate; a
syncer's, which has a book of keys to ask, serves only who shows a key of the run that the book has nothing against.

Rules that hold here: nothing below TLS 1.3, and no session is taken up again, so that the book is asked in every
handshake. A certificate is good for one side: no learner can play the syncer. Whatever is wrong with a key file or with
the other side is one line that says what, where and what to do. Nothing here knows frames or peers.
"""

from __future__ import annotations

import datetime as dt
import os
import re
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from skerry.core.vocabulary import ADMIN
from skerry.errors import KeysError
from skerry.secrecy import objection

if TYPE_CHECKING:
    from cryptography import x509

SYNCER = "syncer"  # the DNS name in the syncer's certificate, whatever its machine is called
KEY_FILE_BYTES_MAX = 1 << 20
ANOTHER = "ask for another, made with skerry keys issue RUN NAME"
OTHER_RUN = "certificate is of another run"
ONE_RUN = "check that both sides' keys are of one run (skerry keys)"  # either side may read it, or be wrong
PEM_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\s*", re.DOTALL)

# Of a name, a serial number (hexadecimal) and whether the key is an admin's: why it may not come, or nothing.
Refusal = Callable[[str, str, bool], str]

# What is wrong with the other side's certificate, by OpenSSL's number of it (X509_V_ERR_…).
VERDICTS = {
    7: f"its {OTHER_RUN}",
    9: "its certificate is not good yet: one of the two machines' clocks is wrong",
    10: "its certificate has expired",
    18: f"its {OTHER_RUN}",
    19: f"its {OTHER_RUN}",
    20: f"its {OTHER_RUN}",
    21: f"its {OTHER_RUN}",
    26: "its certificate is not for this side of a connection",
    62: "its certificate is not a syncer's",
}
# What the other side has said of ours, by OpenSSL's word.
ALERTS = {
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "our certificate has expired, or is not good yet by its clock",
    "TLSV1_ALERT_UNKNOWN_CA": f"our {OTHER_RUN}",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "our certificate is not for this side of a connection",
    "SSLV3_ALERT_BAD_CERTIFICATE": "our certificate is not good, or not yet by its clock",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "our certificate is not good",
    "TLSV1_ALERT_DECRYPT_ERROR": f"our {OTHER_RUN}",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "we have shown no certificate",
    "TLSV1_ALERT_PROTOCOL_VERSION": "it speaks no TLS 1.3",
}
BY_ITS_CLOCK = {"SSLV3_ALERT_CERTIFICATE_EXPIRED", "SSLV3_ALERT_BAD_CERTIFICATE"}  # it may say that of a good one
NO_TLS = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "UNKNOWN_PROTOCOL", "UNEXPECTED_MESSAGE"}
NO_KEYS_THERE = (
    "what answers there speaks without TLS: start the syncer with keys, or leave key_file (or SKERRY_KEY_FILE) out"
)
NEEDS_KEY = (
    "this syncer asks for a key: name a key file of the run, made with skerry keys issue RUN NAME (SKERRY_KEY_FILE); "
    "on its own machine skerry status RUN needs none"
)


class Tls:
    """One side's key, ready for any number of connections.

    With `refusal` it is a syncer's, and that is asked in every handshake who may not come; without, a learner's.
    """

    def __init__(self, key_file: str | Path, refusal: Refusal | None = None) -> None:
        self._refusal, self.key_file = refusal, str(key_file)
        self.is_syncer = refusal is not None
        pem = _read(key_file)
        authority = _checked(pem, self.key_file)
        self._ends = _certificates(pem, self.key_file)[0].not_valid_after_utc
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if self.is_syncer else ssl.PROTOCOL_TLS_CLIENT)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION
        self._context.verify_mode = ssl.CERT_REQUIRED
        if self.is_syncer:
            self._context.num_tickets = 0  # they would let a revoked key in, and be unread when a learner closes
        else:
            self._context.hostname_checks_common_name = False
        try:
            self._context.load_cert_chain(self.key_file)
            self._context.load_verify_locations(cadata=authority.decode())
        except (ssl.SSLError, OSError) as error:
            raise KeysError(f"{self.key_file}: cannot be used ({_word(error)}): {ANOTHER}") from None

    def __repr__(self) -> str:
        return f"<Tls of {self.key_file}, a {'syncer' if self.is_syncer else 'learner'}'s>"

    def begin(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO) -> ssl.SSLObject:
        """One connection whose encrypted bytes are carried by somebody else."""
        if self.is_syncer:
            return self._context.wrap_bio(incoming, outgoing, server_side=True)
        return self._context.wrap_bio(incoming, outgoing, server_hostname=SYNCER)

    def dialled(self, sock: socket.socket) -> ssl.SSLSocket:
        """A connected socket that waits, as a learner's connection; waits for the handshake too."""
        assert not self.is_syncer
        return self._context.wrap_socket(sock, server_hostname=SYNCER)

    def accepted(self, sock: socket.socket) -> ssl.SSLSocket:
        """The same at a syncer's side; what a run's book has against who dialled is the caller's to ask."""
        assert self.is_syncer
        return self._context.wrap_socket(sock, server_side=True)

    def is_refused_for_good(self, error: ssl.SSLError) -> bool:
        """The other side will not have our certificate, and not only because its clock is wrong."""
        word = error.reason or ""
        return word in ALERTS and (word not in BY_ITS_CLOCK or dt.datetime.now(dt.UTC) >= self._ends)

    def objection(self, shown: ssl.SSLObject) -> str:
        """Why this side will not have who has proved its certificate; empty if it will."""
        if self._refusal is None:
            return ""
        serial = str((shown.getpeercert() or {}).get("serialNumber", ""))
        return self._refusal(principal_of(shown), f"{int(serial, 16):x}" if serial else "", is_admin(shown))


def principal_of(shown: ssl.SSLObject) -> str:
    """The name in the certificate that the other side has proved."""
    return _subject(shown, "commonName")


def is_admin(shown: ssl.SSLObject) -> bool:
    """Whether that certificate is an admin's."""
    return _subject(shown, "organizationalUnitName") == ADMIN


def _subject(shown: ssl.SSLObject, field: str) -> str:
    subject: object = (shown.getpeercert() or {}).get("subject", ())
    assert isinstance(subject, tuple)
    return next((str(value) for part in subject for key, value in part if key == field), "")


def name_of(key_file: str | Path) -> str:
    """The learner whose key file this is; refused if it cannot be used."""
    certificate, _ = _certificates(_read(key_file), str(key_file))
    return _common_name(certificate)


def explain(error: ssl.SSLError, is_proved: bool) -> str:
    """What went wrong on a connection, for a person; `is_proved`: by then the other side had shown who it is."""
    word = error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        verdict = VERDICTS.get(error.verify_code, error.verify_message)
        return f"TLS: {verdict}: {ONE_RUN if OTHER_RUN in verdict else 'it needs another key (skerry keys)'}"
    if word in ALERTS:
        who = "the other side says" if is_proved else "somebody says"
        return f"TLS: {who} that {ALERTS[word]}: {ONE_RUN if OTHER_RUN in ALERTS[word] else ANOTHER}"
    if word == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "TLS: it has shown no certificate"
    if is_plain(error) and not is_proved:
        return "it speaks no TLS"
    return f"TLS: {_word(error)}"


def is_plain(error: ssl.SSLError) -> bool:
    """What was read is no TLS."""
    return error.reason in NO_TLS


def _word(error: OSError) -> str:
    reason = getattr(error, "reason", None) or error.strerror or str(error)
    return str(reason).replace("_", " ").lower()


# ------------------------------------------------------------------------------------------------- key files


def _read(key_file: str | Path) -> bytes:
    try:
        with open(key_file, "rb") as opened:
            mend, instead = f"chmod 600 {key_file}, or {ANOTHER}", f"run this as that user, or {ANOTHER}"
            if trouble := objection(os.fstat(opened.fileno()), "this key", mend, instead):
                raise KeysError(f"{key_file}: {trouble}")
            return opened.read(KEY_FILE_BYTES_MAX)
    except OSError as error:
        raise KeysError(f"{key_file}: the key cannot be read ({_word(error)}): check the path, or {ANOTHER}") from None


def _checked(pem: bytes, where: str) -> bytes:
    """The authority's certificate of a key file that is as it should be today."""
    certificate, authority = _certificates(pem, where)
    for whose, each in (("the key", certificate), ("the run's authority", authority)):
        if trouble := _out_of_time(each, dt.datetime.now(dt.UTC)):
            raise KeysError(f"{where}: {whose} {trouble}{ANOTHER}")
    found: list[bytes] = PEM_CERTIFICATE.findall(pem)
    return found[-1]


def _out_of_time(certificate: x509.Certificate, now: dt.datetime) -> str:
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now >= ends:
        return f"has expired on {ends:%Y-%m-%d}: "
    return f"is not good before {begins:%Y-%m-%d}: set this machine's clock, or " if now < begins else ""


def _certificates(pem: bytes, where: str) -> tuple[x509.Certificate, x509.Certificate]:
    """The owner's and the authority's, if the file is whole and its key belongs to them."""
    from cryptography import x509  # takes a while to load, and who has no key needs none of it
    from cryptography.hazmat.primitives import serialization

    try:
        key = serialization.load_pem_private_key(pem, None)
        found = x509.load_pem_x509_certificates(pem)
    except (ValueError, TypeError):
        raise KeysError(f"{where}: is no key file: {ANOTHER}") from None
    if len(found) != 2:
        raise KeysError(f"{where}: is no key file: it has {len(found)} certificates instead of 2: {ANOTHER}")
    if key.public_key() != found[0].public_key():
        raise KeysError(f"{where}: its key is not its certificate's: {ANOTHER}")
    if found[0].issuer != found[1].subject:
        raise KeysError(f"{where}: its certificate is not of its authority: {ANOTHER}")
    return found[0], found[1]


def _common_name(certificate: x509.Certificate) -> str:
    from cryptography.x509.oid import NameOID

    return next((str(each.value) for each in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)), "")
