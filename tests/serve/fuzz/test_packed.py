"""A short run of the packed bodies of `make fuzz`, the same in every run of the tests."""

from __future__ import annotations

from tests.serve.fuzz.packed import fuzz_packed


def test_what_is_judged_is_what_was_packed_or_nothing() -> None:
    assert fuzz_packed(1, seconds=60, most=300) == 300
