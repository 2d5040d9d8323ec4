"""One role's variables; tests/eval/judge has the values one by one."""

from __future__ import annotations

import pytest

from guard.endpoint.client import Endpoint
from guard.endpoint.settings import endpoint_settings
from guard.errors import GuardError

SET = {"GENERATOR_BASE_URL": "http://x/v1", "GENERATOR_MODEL": "m", "JUDGE_MODEL": "another role's"}


def test_a_role_reads_its_own_variables() -> None:
    settings = endpoint_settings(SET | {"GENERATOR_API_KEY": "k\n"}, "generator", "to go without")
    assert settings is not None
    endpoint = Endpoint(**settings)
    assert (endpoint.url, endpoint.model, endpoint.api_key, endpoint.role) == (
        "http://x/v1/chat/completions",
        "m",
        "k",
        "generator",
    )
    assert endpoint_settings({"JUDGE_MODEL": "m"}, "generator", "to go without") is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"GENERATOR_MODEL": ""}, r"GENERATOR_MODEL is not set.*or neither to go without"),
        ({"GENERATOR_TIMEOUT_S": "-1"}, r"GENERATOR_TIMEOUT_S has a bad value.*Seconds"),
        *(
            (
                {"GENERATOR_BASE_URL": url},
                r"(?s)^(?!.*secret)GENERATOR_BASE_URL holds a user name.*GENERATOR_API_KEY",
            )
            for url in ("https://me:secret@x/v1", "me:secret@x/v1", "ftp://me:secret@x")
        ),
        ({"GENERATOR_API_KEY": "a\nb"}, r"GENERATOR_API_KEY holds a character"),
    ],
)
def test_errors_name_the_role_s_variable(changed: dict[str, str], message: str) -> None:
    with pytest.raises(GuardError, match=message):
        endpoint_settings(SET | changed, "generator", "to go without")
