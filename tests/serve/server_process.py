"""The server as a process of its own, with all of its options. Tests only."""

from __future__ import annotations

import ssl
import subprocess
import sys
from pathlib import Path

import httpx

from guard.home import ROOT
from serve.tenants.key_ring import key_hash
from tests.serve.certificates import make_certificates
from tests.serve.guarded import save_adapter

SHOP = {"authorization": "Bearer the shop's key"}
ADMIN = {"authorization": "Bearer the admin's key"}
TENANTS = f"""
admin_keys_sha256: ["{key_hash("the admin's key")}"]
tenants: {{shop: {{keys_sha256: ["{key_hash("the shop's key")}"], rule_sets: [support]}}}}
"""


class ServerProcess:
    """`python -m serve.up` on the tiny base, with a random adapter for the rule `pii_leak`.

    It has a rule set, a tenant, an admin, an audit log, and TLS with certificates on both ends.
    """

    def __init__(self, folder: Path) -> None:
        self.audit = folder / "audit.jsonl"
        self.errors = folder / "stderr"
        self._files = make_certificates(folder)
        save_adapter(folder / "tiny" / "pii_leak" / "alora", "pii_leak", seed=2)
        (folder / "sets.yaml").write_text(
            "rule_sets: {support: {rules: [pii_leak], violated_if: "
            "{rule: pii_leak, unless: {metadata: {audience: staff}}}}}"
        )
        (folder / "tenants.yaml").write_text(TENANTS)
        options = {
            "runs": folder,
            "port": 0,
            "rule-sets": folder / "sets.yaml",
            "tenants": folder / "tenants.yaml",
            "audit-log": self.audit,
            "tls-cert": self._files.server,
            "tls-key": self._files.server_key,
            "tls-client-ca": self._files.authority,
        }
        command = [sys.executable, "-m", "serve.up"]
        command += [f"--{name}={value}" for name, value in options.items()]
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self.output = ""
        self.address = self._address()

    def _address(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if "is ready" in line:
                return line.partition("/v1/check")[0]
        raise AssertionError(self.errors.read_text())

    def client(self, *, has_certificate: bool = True) -> httpx.Client:
        context = ssl.create_default_context(cafile=self._files.authority)
        if has_certificate:
            context.load_cert_chain(self._files.client)
        return httpx.Client(base_url=self.address, verify=context, timeout=60, trust_env=False)
