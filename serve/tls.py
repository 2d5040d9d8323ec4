"""TLS from PEM files, checked before an engine starts. Knows nothing of what is served."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from guard.errors import GuardError


def tls_settings(cert: Path | None, key: Path | None, client_ca: Path | None) -> dict[str, Any]:
    """uvicorn's settings for these files, if any. Raises GuardError for no certificate or key."""
    if cert is None:
        if key or client_ca:
            remedy = "Name the certificate with --tls-cert (TLSCERT=)"
            raise GuardError("TLS needs a certificate", got=key or client_ca, remedy=remedy)
        return {}
    settings: dict[str, Any] = {"ssl_certfile": cert, "ssl_keyfile": key}
    if client_ca is not None:
        settings |= {"ssl_ca_certs": str(client_ca), "ssl_cert_reqs": ssl.CERT_REQUIRED}
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a terminal to ask, a key with a password would let the server hang.
        context.load_cert_chain(cert, key, password=str)
        if client_ca is not None:
            context.load_verify_locations(client_ca)
    except OSError as error:
        remedy = (
            "Name PEM files: the chain (TLSCERT=), its key without a password (TLSKEY=), "
            "the clients' authority (TLSCA=)"
        )
        where = ", ".join(str(path) for path in (cert, key, client_ca) if path)
        raise GuardError(f"TLS cannot be set up: {error}", where=where, remedy=remedy) from error
    return settings
