"""The X.509 of a run's keys: an authority, what it signs, and reading a key file.

Pure but for randomness: the time comes in, files are somebody else's (`run/keys.py`). The curve is P-256. An
authority's certificate signs keys and nothing else, a syncer's is good for serving only, a learner's and an admin's for
dialling only; an admin's says so in its name.
"""

from __future__ import annotations

import datetime as dt
import secrets
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from skerry.core.vocabulary import ADMIN
from skerry.errors import KeysError

Role = Literal["learner", "admin"]
AUTHORITY_DAYS = 3650
RENEWED_SHARE = 1 / 3  # of its life, that a syncer's key has left when it is made again
BACKDATED = dt.timedelta(days=1)  # a machine whose clock is behind must not find a new key not good yet

Private = ec.EllipticCurvePrivateKey


def new_authority(now: dt.datetime) -> tuple[Private, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _named(f"skerry run {secrets.token_hex(4)}")  # of another run another, so that they are not taken for one
    builder = _builder(name, name, key, key, now, AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return key, builder.add_extension(_usage(signs_keys=True), critical=True).sign(key, hashes.SHA256())


def leaf(
    authority: Private, issuer: x509.Certificate, name: str, days: int, now: dt.datetime, role: Role = "learner"
) -> tuple[bytes, int, dt.datetime]:
    """A key file, its serial number and when it expires: of the learner of this name, or without one the syncer's."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _named(name or "syncer", ADMIN if role == "admin" else "")
    builder = _builder(subject, issuer.subject, key, authority, now, days, issuer.not_valid_after_utc)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_usage(signs_keys=False), critical=True)
    purpose = ExtendedKeyUsageOID.CLIENT_AUTH if name else ExtendedKeyUsageOID.SERVER_AUTH
    builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=True)
    if not name:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("syncer")]), critical=False)
    certificate = builder.sign(authority, hashes.SHA256())
    return encoded(key, certificate, issuer), certificate.serial_number, certificate.not_valid_after_utc


def encoded(key: Private, *certificates: x509.Certificate) -> bytes:
    """A file of ours: the private key, then its certificate, then who signed that."""
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    private = key.private_bytes(pem, form, serialization.NoEncryption())
    return private + b"".join(certificate.public_bytes(pem) for certificate in certificates)


def read(pem: bytes, where: Path, remedy: str = "restore it from a copy") -> tuple[Private, x509.Certificate]:
    """The private key and the first certificate of a file of ours."""
    try:
        key = serialization.load_pem_private_key(pem, None)
        certificate = x509.load_pem_x509_certificates(pem)[0]
    except (ValueError, TypeError):
        raise KeysError(f"{where}: holds no key and certificate: {remedy}") from None
    if not isinstance(key, Private) or key.public_key() != certificate.public_key():
        raise KeysError(f"{where}: its key is not its certificate's: {remedy}")
    return key, certificate


def serial_of(pem: bytes, where: Path) -> str:
    return f"{read(pem, where)[1].serial_number:x}"


def dialler_of(certificate: x509.Certificate) -> str:
    """Whose it is, if it is good for dialling; empty if it is not."""
    names = [str(name.value) for name in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    usages = [each.value for each in certificate.extensions if isinstance(each.value, x509.ExtendedKeyUsage)]
    return names[0] if names and usages and ExtendedKeyUsageOID.CLIENT_AUTH in usages[0] else ""


def staleness(pem: bytes, authority: x509.Certificate, now: dt.datetime, where: Path) -> str:
    """Why the syncer's key has to be made again; empty if it is of this authority and has a third of its life left."""
    try:
        certificate = read(pem, where)[1]
        certificate.verify_directly_issued_by(authority)
    except KeysError:
        return "the file held no key of a syncer"
    except (ValueError, TypeError, InvalidSignature):
        return "it was of another authority"
    if x509.load_pem_x509_certificates(pem)[1:] != [authority]:
        return "the file was not whole"
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now < begins:  # made while this machine's clock was ahead
        return f"it was not good before {begins:%Y-%m-%d}"
    return "" if ends - now > RENEWED_SHARE * (ends - begins) else f"it was good until {ends:%Y-%m-%d}"


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: Private,
    authority: Private,
    now: dt.datetime,
    days: int,
    until: dt.datetime | None = None,
) -> x509.CertificateBuilder:
    expires = now + dt.timedelta(days=days)
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(min(expires, until) if until else expires)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(signer, critical=False)
    )


def _usage(*, signs_keys: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_keys,
        key_cert_sign=signs_keys,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _named(name: str, unit: str = "") -> x509.Name:
    units = [x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, unit)] if unit else []
    return x509.Name([*units, x509.NameAttribute(NameOID.COMMON_NAME, name)])
