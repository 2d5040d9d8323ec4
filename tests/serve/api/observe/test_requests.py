"""Every request has an id, the caller's if it is one, and its response says it."""

from __future__ import annotations

import re

import pytest
from httpx import Client


@pytest.mark.parametrize(
    ("request_id", "is_one"),
    [
        ("a3f9", True),
        ("4bf92f35-77b3.1:2_x", True),
        ("x" * 64, True),
        ("", False),
        ("two words", False),
        ("x" * 65, False),
        ("<script>", False),
    ],
)
def test_a_caller_s_id_comes_back(client: Client, request_id: str, is_one: bool) -> None:
    for path in ("/v1/rules", "/nowhere"):
        answered = client.get(path, headers={"x-request-id": request_id}).headers["x-request-id"]
        assert (answered == request_id) == is_one
        assert is_one or re.fullmatch("[0-9a-f]{32}", answered)
