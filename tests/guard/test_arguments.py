"""Types of command-line options."""

import argparse
from collections.abc import Callable

import pytest

from guard.arguments import (
    comma_separated,
    count,
    multiple,
    names_listed,
    port,
    seconds,
    whole_number,
    whole_numbers,
)
from guard.errors import GuardError


@pytest.mark.parametrize(
    ("argument_type", "text", "value"),
    [
        (whole_number, "0", 0),
        (count, "1", 1),
        (whole_numbers, "2, 0,2", (2, 0)),
        (port, "0", 0),
        (port, "65535", 65535),
        (seconds, "0.5", 0.5),
        (lambda text: multiple(text, 4, 4), "8", 8),
    ],
)
def test_what_is_wanted_is_taken(
    argument_type: Callable[[str], object], text: str, value: object
) -> None:
    assert argument_type(text) == value


@pytest.mark.parametrize(
    ("argument_type", "text", "wanted"),
    [
        (whole_number, "-1", "a whole number from 0"),
        (count, "0", "a whole number from 1"),
        (count, "one", "a whole number from 1"),
        (whole_numbers, "0,-1", "a whole number from 0"),
        (whole_numbers, "", "a whole number from 0"),
        (port, "65536", "a port from 0 to 65535"),
        (seconds, "0", "a number of seconds above 0"),
        (seconds, "inf", "a number of seconds above 0"),
        (seconds, "soon", "a number of seconds above 0"),
        (lambda text: multiple(text, 4, 4), "6", "a multiple of 4 from 4"),
        (lambda text: multiple(text, 2, 20), "18", "a multiple of 2 from 20"),
    ],
)
def test_anything_else_is_refused_with_what_is_wanted_and_what_was_given(
    argument_type: Callable[[str], object], text: str, wanted: str
) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"must be {wanted}, got "):
        argument_type(text)


def test_names_are_a_list_and_taken_once_each_in_the_order_given() -> None:
    assert comma_separated(" b, a,,b ", "rule") == ["b", "a"]
    with pytest.raises(GuardError, match=r"no rule was named \(got ' , '\)"):
        comma_separated(" , ", "rule")
    assert names_listed(["ab", "c"], "rules") == ("ab", "c")
    with pytest.raises(GuardError, match=r"rules must be a list of names .*Write \['ab'\]"):
        names_listed("ab", "rules")
