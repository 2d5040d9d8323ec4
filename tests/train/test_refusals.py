"""What a library raises for a recipe's settings says where they stand."""

from __future__ import annotations

import pytest

from guard.errors import GuardError
from train.refusals import refusals


@pytest.mark.parametrize("error", [TypeError, ValueError, AttributeError, ImportError])
def test_what_a_library_refuses_names_the_library_and_the_section(error: type[Exception]) -> None:
    with pytest.raises(GuardError) as raised, refusals("PEFT", "recipe x: trainer"):
        raise error("no such rank")
    assert raised.value.where == "recipe x: trainer"
    assert "PEFT" in raised.value.problem
    assert "no such rank" in raised.value.problem


def test_what_is_no_refusal_passes() -> None:
    with pytest.raises(KeyError), refusals("PEFT", "recipe x: trainer"):
        raise KeyError("ours")
