"""Files that are no certificate and its key are refused, with the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from guard.errors import GuardError
from serve.tls import tls_settings
from tests.serve.certificates import make_certificates


def test_files_that_are_no_certificate_and_its_key_are_refused_at_the_start(
    tmp_path: Path,
) -> None:
    files = make_certificates(tmp_path)
    assert tls_settings(None, None, None) == {}
    assert set(tls_settings(files.client, None, None)) == {"ssl_certfile", "ssl_keyfile"}
    for cert, key, client_ca, error in (
        (None, files.server_key, None, "needs a certificate"),
        (files.server, None, None, "TLS cannot be set up"),
        (files.server, files.client, None, "TLS cannot be set up"),
        (files.server, tmp_path / "gone.pem", None, "TLS cannot be set up"),
        (files.server, files.server_key, files.server_key, "TLS cannot be set up"),
    ):
        with pytest.raises(GuardError, match=error) as raised:
            tls_settings(cert, key, client_ca)
        assert raised.value.remedy
