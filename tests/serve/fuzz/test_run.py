"""A short run of `make fuzz`, the same in every run of the tests; the long one is the command's."""

from __future__ import annotations

import pytest

from tests.serve.fuzz.hidden_words import Repeated, hide_words, written
from tests.serve.fuzz.run import fuzz
from tests.serve.fuzz.sequences import fuzz_sequences

pytestmark = pytest.mark.slow

SHORT = ("--max-examples=40", "--phases=coverage,fuzzing", "--max-failures=5")


def test_no_answer_to_what_the_description_allows_or_forbids_is_an_error_or_an_allow() -> None:
    status, checks = fuzz(1, *SHORT)
    assert status == 0
    # Else it was refused before anything was judged. Fifty to a hundred: Hypothesis draws on the
    # constants of our source, so they change with it.
    assert checks > 20


def test_no_word_is_hidden_under_an_unknown_key_or_one_that_stands_twice() -> None:
    assert hide_words(1, conversations=10) == []


def test_an_object_is_written_with_its_key_twice() -> None:
    for is_first, text in ((True, '[{"a": "b", "a": 1}]'), (False, '[{"a": 1, "a": "b"}]')):
        assert written([Repeated({"a": 1}, "a", "b", is_first=is_first)]) == text


def test_every_request_of_a_sequence_has_the_answer_that_it_gets_alone() -> None:
    assert fuzz_sequences(1, seconds=60, most=60) == 60
