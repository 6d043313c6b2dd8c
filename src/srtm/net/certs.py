"""A small certificate authority for a first cluster: one CA in a folder, and certificates that it signs.

In: a folder and the names of hosts. Out: `ca.pem` and `ca.key`, and `NAME.pem` and `NAME.key` for each name; keys are
readable by their owner alone, and no file is overwritten. A certificate serves servers and clients alike: its common
name is the name of a broker or a host, and it is valid for the hosts that are given. `ca.key` signs more of them, so it
belongs on no host of the cluster.
"""

from __future__ import annotations

import ipaddress
import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from srtm.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable

CA: Final = "ca"
CA_DAYS: Final = 3650
DAYS: Final = 397  # the longest that browsers accept
_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.\-]{0,62}[A-Za-z0-9])?")


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """The paths of a certificate and of its key."""
    return folder / f"{name}.pem", folder / f"{name}.key"


def make_authority(folder: Path) -> None:
    """Make a CA in a folder that has none."""
    x509, ec, hashes, serialization = _cryptography()
    _refuse_existing(certificate(folder, CA))
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _subject(x509, f"SRTM CA of {datetime.now(UTC):%Y-%m-%d %H:%M:%S}")
    public = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    made = (
        _builder(x509, subject, subject, key.public_key(), CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(x509, signs=True), critical=True)
        .add_extension(public, critical=False)
        .sign(key, hashes.SHA256())
    )
    _write(folder, CA, made, key, serialization)


def issue(folder: Path, name: str, hosts: Iterable[str]) -> None:
    """Make a certificate with that common name, valid for these hosts and addresses."""
    x509, ec, hashes, serialization = _cryptography()
    if not _NAME.fullmatch(name) or name == CA:
        raise InputError(f"invalid name of a certificate {name!r}; use up to 64 letters, digits, '_', '.' and '-'")
    _refuse_existing(certificate(folder, name))
    ca_path, ca_key_path = certificate(folder, CA)
    try:
        authority = x509.load_pem_x509_certificate(ca_path.read_bytes())
        signer = serialization.load_pem_private_key(ca_key_path.read_bytes(), None)
    except OSError as problem:
        raise InputError(
            f"cannot read the CA in {folder}: {problem.strerror}; make one with srtm certs init, or give its folder"
        ) from None
    except (ValueError, TypeError) as problem:
        raise InputError(f"{ca_path} and {ca_key_path} are not a CA of srtm certs init: {problem}") from None
    key = ec.generate_private_key(ec.SECP256R1())
    names = [_general_name(x509, host) for host in dict.fromkeys((name, *hosts))]
    usage = [x509.oid.ExtendedKeyUsageOID.SERVER_AUTH, x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH]
    made = (
        _builder(x509, _subject(x509, name), authority.subject, key.public_key(), DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(x509, signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()),
            critical=False,
        )
        .sign(signer, hashes.SHA256())
    )
    _write(folder, name, made, key, serialization)


def _cryptography() -> tuple[Any, Any, Any, Any]:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise InputError("making certificates needs cryptography: pip install 'srtm[creds]'") from None
    return x509, ec, hashes, serialization


def _subject(x509: Any, name: str) -> Any:
    return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, name)])


def _builder(x509: Any, subject: Any, issuer: Any, public_key: Any, days: int) -> Any:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # hosts' clocks differ
        .not_valid_after(now + timedelta(days=days))
    )


def _usage(x509: Any, *, signs: bool) -> Any:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(x509: Any, host: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not _NAME.fullmatch(host):
        raise InputError(f"invalid host {host!r}; give a host name or an address", host=host)
    return x509.DNSName(host)


def _refuse_existing(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.exists():
            raise InputError(f"{path} exists; remove it first, or choose another folder", path=str(path))


def _write(folder: Path, name: str, made: Any, key: Any, serialization: Any) -> None:
    form = serialization.PrivateFormat.PKCS8
    secret = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    path, key_path = certificate(folder, name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _create(key_path, secret, 0o600)
        _create(path, made.public_bytes(serialization.Encoding.PEM), 0o644)
    except OSError as problem:
        raise InputError(f"cannot write to {folder}: {problem.strerror}", path=str(folder)) from None


def _create(path: Path, content: bytes, mode: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
