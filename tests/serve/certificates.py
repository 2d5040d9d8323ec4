"""Certificates of an authority of our own, for a server here and its clients. Tests only."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Certificates:
    """Files: the authority's certificate, and a chain with its key for each end."""

    authority: Path
    server: Path
    server_key: Path
    client: Path  # with its key


def _certificate(
    subject: str,
    key: ec.EllipticCurvePrivateKey,
    issuer_key: ec.EllipticCurvePrivateKey,
    *,
    is_authority: bool = False,
) -> bytes:
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    names = [x509.NameAttribute(NameOID.COMMON_NAME, text) for text in (subject, "authority")]
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name(names[:1]))
        .issuer_name(x509.Name(names[1:]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
    )
    return builder.sign(issuer_key, hashes.SHA256()).public_bytes(Encoding.PEM)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def make_certificates(folder: Path) -> Certificates:
    authority, server, client = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    names = ("authority.pem", "server.pem", "key.pem", "client.pem")
    files = Certificates(*(folder / name for name in names))
    files.authority.write_bytes(_certificate("authority", authority, authority, is_authority=True))
    files.server.write_bytes(_certificate("server", server, authority))
    files.server_key.write_bytes(_pem(server))
    files.client.write_bytes(_certificate("client", client, authority) + _pem(client))
    return files
