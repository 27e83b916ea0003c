"""Make a job's certificates: one for each role, signed by an authority of the job whose key is not kept."""

from __future__ import annotations

import datetime
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.nouns.errors import UsageError

AUTHORITY, CERTIFICATE, KEY = "authority.pem", "certificate.pem", "key.pem"
ROLES = ("coordinator", "server", "worker", "watcher")
DAYS = 30
_NAME = "paceline job authority"
_FOLDER = "credentials"


def make_credentials(folder: Path, days: int = DAYS) -> list[Path]:
    """Make an authority and a certificate for every role: one folder each, to copy where the role runs.

    The authority's key is not kept: nobody can add to the job later. Keys can be read only by this user.

    Args:
        folder: a new one.
        days: that the certificates hold.

    Returns:
        The roles' folders.

    Raises:
        UsageError: the folder exists or can't be written, or the library for it is not installed.
    """
    # Before the folder is made: without the library nothing is left behind.
    texts = new_credentials(days)
    try:
        folder.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise UsageError(
            f"can't write credentials in {folder}", f"the folder can't be made ({error.strerror})", "name a new one"
        ) from None
    _write_roles(folder, texts)
    return [folder / role for role in ROLES]


def check_can_make() -> None:
    """Raise UsageError where the library for certificates is not installed."""
    if importlib.util.find_spec("cryptography") is None:
        raise UsageError(
            "can't make certificates for a job",
            "the package cryptography is not installed",
            "pip install 'paceline[tls]'",
        )


def new_credentials(days: int = DAYS) -> dict[str, dict[str, str]]:
    """Return a new job's certificates as texts, by role and file, for `keep_credentials` on its hosts.

    Args:
        days: that the certificates hold.

    Raises:
        UsageError: the library for them is not installed.
    """
    check_can_make()
    from cryptography.hazmat.primitives.asymmetric import ec

    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority = _pem(_certificate(_NAME, authority_key.public_key(), authority_key, days, is_authority=True))
    texts: dict[str, dict[str, str]] = {}
    for role in ROLES:
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _pem(_certificate(role, key.public_key(), authority_key, days))
        texts[role] = {AUTHORITY: authority, CERTIFICATE: certificate, KEY: _key_pem(key)}
    return texts


def keep_credentials(private: Path, texts: Mapping[str, Mapping[str, str]]) -> None:
    """Write a job's certificates to files that only this user can read, by role: see `credentials_folder`."""
    for role in texts:
        credentials_folder(private, role)  # refuses what is no role, before anything is written
    (private / _FOLDER).mkdir(mode=0o700)
    _write_roles(private / _FOLDER, texts)


def credentials_folder(private: Path, role: str) -> Path:
    """Return the folder of a role's certificate and key, which only this user can enter.

    Raises:
        UsageError: there is no such role.
    """
    if role not in ROLES:
        raise UsageError(
            f"can't read the credentials of a {role}", "there is no such role", f"name one of {', '.join(ROLES)}"
        )
    return private / _FOLDER / role


def _write_roles(folder: Path, texts: Mapping[str, Mapping[str, str]]) -> None:
    for role, files in texts.items():
        (folder / role).mkdir(mode=0o700)
        for name in (AUTHORITY, CERTIFICATE, KEY):
            _write(folder / role / name, files[name].encode())


def _certificate(name: str, public: Any, signer: Any, days: int, is_authority: bool = False) -> object:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now = datetime.datetime.now(datetime.UTC)
    # A server's process accepts connections and opens them, with one certificate.
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _NAME)]))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # hosts' clocks need not agree
        .not_valid_after(now + datetime.timedelta(days=days))
        # path_length=0: the authority signs roles, no further authorities.
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if is_authority:
        signs = dict.fromkeys(_USAGES, False) | {"key_cert_sign": True}
        builder = builder.add_extension(x509.KeyUsage(**signs), critical=True)
    else:
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    return builder.sign(signer, hashes.SHA256())


_USAGES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)


def _pem(certificate: Any) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding

    content: bytes = certificate.public_bytes(Encoding.PEM)
    return content.decode()


def _key_pem(key: Any) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    content: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return content.decode()


def _write(path: Path, content: bytes) -> None:
    # 0o600 from the first moment, and O_EXCL: neither an older file's permissions nor a link is followed.
    end = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(end, "wb") as file:
        file.write(content)
