"""A short run of the sequences of `make fuzz`, the same in every run of the tests."""

from __future__ import annotations

from tests.serve.fuzz.sequences import fuzz_sequences


def test_every_request_of_a_sequence_has_the_answer_that_it_gets_alone() -> None:
    assert fuzz_sequences(1, seconds=60, most=60) == 60
