"""Keys of runs for tests: made with `cryptography` alone, so that what the product makes is not tested by itself."""

import datetime as dt
import functools
import tempfile
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from skerry.wire.tls import Tls

DAY = dt.timedelta(days=1)


class Authority:
    """Of one run, with a folder for the key files that it makes."""

    def __init__(self, folder, name="run"):
        self.folder = Path(folder)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = named(name)
        self.certificate = self._signed(self._name, self._key, -1, 10, x509.BasicConstraints(True, 0))
        self.serials = {}

    def key_file(self, name, begins=-1, ends=9, key=None, is_syncer=None):
        """Good from and to so many days from now."""
        own = ec.generate_private_key(ec.SECP256R1())
        is_syncer = name == "syncer" if is_syncer is None else is_syncer
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if is_syncer else ExtendedKeyUsageOID.CLIENT_AUTH
        extensions = [x509.BasicConstraints(False, None), x509.ExtendedKeyUsage([purpose])]
        if is_syncer:
            extensions.append(x509.SubjectAlternativeName([x509.DNSName("syncer")]))
        certificate = self._signed(named(name), own, begins, ends, *extensions)
        path = self.folder / f"{name}-{certificate.serial_number:x}.key"
        path.touch(0o600)
        path.write_bytes(private(key or own) + public(certificate) + public(self.certificate))
        self.serials[name] = f"{certificate.serial_number:x}"
        return path

    def _signed(self, subject, key, begins, ends, *extensions):
        now = dt.datetime.now(dt.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + begins * DAY)
            .not_valid_after(now + ends * DAY)
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=not isinstance(extension, x509.SubjectAlternativeName))
        return builder.sign(self._key, hashes.SHA256())


def named(name):
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def private(key):
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def public(certificate):
    return certificate.public_bytes(serialization.Encoding.PEM)


def everybody(name, serial, is_admin):
    """A book that has nothing against anybody."""
    return ""


@functools.cache
def run():
    """The authority of a run and of another one, made once for all tests."""
    folder = tempfile.TemporaryDirectory(prefix="skerry-keys-")
    authority = Authority(folder.name)
    authority.holds = folder  # until the process ends
    authority.files = {name: authority.key_file(name) for name in ("syncer", "fern", "moss")}
    return authority


def syncer_tls(refusal=everybody):
    return Tls(run().files["syncer"], refusal)


def learner_tls(name="fern"):
    return Tls(run().files[name])
