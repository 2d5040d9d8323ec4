"""A short run of `make fuzz`, the same in every run of the tests; the long one is the command's."""

from __future__ import annotations

import pytest

from tests.serve.fuzz.run import fuzz

pytestmark = pytest.mark.slow

SHORT = ("--max-examples=25", "--phases=coverage,fuzzing", "--max-failures=5")


def test_no_answer_to_what_the_description_allows_or_forbids_is_an_error_or_an_allow() -> None:
    status, checks = fuzz(1, *SHORT)
    assert status == 0
    # Else it was refused before anything was judged. About a hundred: Hypothesis draws on the
    # constants of our source, so they change with it.
    assert checks > 50
