"""The server as a process of its own, with all of its options, and certificates of an authority of
our own for it and its clients. Tests only.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import ssl
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from guard.home import ROOT
from serve.registry.reviews import KEY
from serve.tenants.key_ring import key_hash
from tests.serve.guarded import save_adapter
from tests.serve.review_store import new_key

SHOP = {"authorization": "Bearer the shop's key"}
ADMIN = {"authorization": "Bearer the admin's key"}
TENANTS = f"""
admins: {{ann: {{keys_sha256: ["{key_hash("the admin's key")}"], role: publisher}}}}
tenants: {{shop: {{keys_sha256: ["{key_hash("the shop's key")}"], rule_sets: [support]}}}}
"""


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


class StartedServer:
    """`python -m serve.up` on the tiny base, once it is ready, with an audit log."""

    def __init__(self, folder: Path, options: Mapping[str, object], **process: Any) -> None:
        self.audit = folder / "audit.jsonl"
        self.errors = folder / "stderr"
        self.output = ""
        command = [sys.executable, "-m", "serve.up", "--port=0", f"--audit-log={self.audit}"]
        command += [f"--{name}={value}" for name, value in options.items()]
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True, **process
            )
        self.address = self._address()

    def _address(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if "is ready" in line:
                return line.partition("/v1/check")[0]
        raise AssertionError(self.errors.read_text())


class ServerProcess(StartedServer):
    """One with a random adapter for `pii_leak`, a rule set, a tenant, an admin, a review store
    that keeps everything, and TLS with certificates on both ends.
    """

    def __init__(self, folder: Path) -> None:
        self.kept = folder / "registry" / "reviews.db"
        self._files = make_certificates(folder)
        save_adapter(folder / "tiny" / "pii_leak" / "alora", "pii_leak", seed=2)
        (folder / "sets.yaml").write_text(
            "rule_sets: {support: {rules: [pii_leak], violated_if: "
            "{rule: pii_leak, unless: {metadata: {audience: staff}}}}}"
        )
        (folder / "tenants.yaml").write_text(TENANTS)
        (folder / "policy.yaml").write_text("share: 1")
        options = {
            "runs": folder,
            "reviews": folder / "policy.yaml",
            "rule-sets": folder / "sets.yaml",
            "tenants": folder / "tenants.yaml",
            "tls-cert": self._files.server,
            "tls-key": self._files.server_key,
            "tls-client-ca": self._files.authority,
        }
        super().__init__(folder, options, env={**os.environ, KEY: new_key()})

    def client(self, *, has_certificate: bool = True) -> httpx.Client:
        context = ssl.create_default_context(cafile=self._files.authority)
        if has_certificate:
            context.load_cert_chain(self._files.client)
        return httpx.Client(base_url=self.address, verify=context, timeout=60, trust_env=False)
