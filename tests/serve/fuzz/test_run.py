"""A short run of `make fuzz`, the same in every run of the tests; the long one is the command's."""

from __future__ import annotations

import pytest

from tests.serve.fuzz.run import fuzz
from tests.serve.fuzz.sequences import fuzz_sequences

pytestmark = pytest.mark.slow

SHORT = ("--max-examples=25", "--phases=coverage,fuzzing", "--max-failures=5")
SAME_ROUTES = "--exclude-path-regex=^/api/v1/text"  # which are there with the rule before them too


def test_no_answer_to_what_the_description_allows_or_forbids_is_an_error_or_an_allow() -> None:
    status, checks = fuzz(1, *SHORT, SAME_ROUTES)
    assert status == 0
    # Else it was refused before anything was judged. Hypothesis draws on the constants of our
    # source, so the number changes with it.
    assert checks > 15


def test_every_request_of_a_sequence_has_the_answer_that_it_gets_alone() -> None:
    assert fuzz_sequences(1, seconds=60, most=60) == 60
