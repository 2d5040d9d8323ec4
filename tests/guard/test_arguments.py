"""Types of command-line options, and the error that users see."""

from __future__ import annotations

import argparse
import ast
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from guard import arguments
from guard.arguments import comma_separated, names_listed
from guard.errors import GuardError, exits_cleanly


def multiple_of_four(text: str) -> int:
    return arguments.multiple(text, 4, 8)


@pytest.mark.parametrize(
    ("argument_type", "right", "value", "wrong", "wanted"),
    [
        (arguments.whole_number, "0", 0, ["-1"], "a whole number from 0"),
        (arguments.count, "1", 1, ["0", "one"], "a whole number from 1"),
        (arguments.whole_numbers, "2, 0,2", (2, 0), ["0,-1", ""], "a whole number from 0"),
        (arguments.port, "65535", 65535, ["65536", "-1"], "a port from 0 to 65535"),
        (arguments.seconds, "0.5", 0.5, ["0", "inf", "soon"], "a number of seconds above 0"),
        (multiple_of_four, "8", 8, ["6", "4"], "a multiple of 4 from 8"),
    ],
)
def test_what_is_wanted_is_taken_and_anything_else_refused(
    argument_type: Callable[[str], object], right: str, value: object, wrong: list[str], wanted: str
) -> None:
    assert argument_type(right) == value
    for text in wrong:
        with pytest.raises(argparse.ArgumentTypeError, match=f"must be {wanted}, got "):
            argument_type(text)


def test_names_are_a_list_and_taken_once_each_in_the_order_given() -> None:
    assert comma_separated(" b, a,,b ", "rule") == ["b", "a"]
    with pytest.raises(GuardError, match=r"no rule was named \(got ' , '\)"):
        comma_separated(" , ", "rule")
    assert names_listed(["ab", "c"], "rules") == ("ab", "c")
    with pytest.raises(GuardError, match=r"rules must be a list of names .*Write \['ab'\]"):
        names_listed("ab", "rules")


def test_an_error_says_what_where_got_and_remedy_and_crosses_a_process_boundary_whole() -> None:
    assert str(GuardError("just this")) == "just this"
    sent = GuardError("unknown role", where="a.jsonl:3", got=0, remedy="Use user")
    error = pickle.loads(pickle.dumps(sent))
    assert str(error) == str(sent) == "a.jsonl:3: unknown role (got 0). Use user"
    assert vars(error) == vars(sent)


@pytest.mark.parametrize(
    ("raised", "status", "printed"),
    [
        (GuardError("broken", where="here"), 2, "error: here: broken\n"),
        (KeyboardInterrupt(), 130, "interrupted; give the same command again"),
    ],
)
def test_a_command_ends_with_one_line_and_a_status_but_a_bug_with_its_traceback(
    raised: BaseException, status: int, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = iter([raised, ZeroDivisionError()])

    @exits_cleanly
    def main() -> None:
        raise next(errors)

    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == status
    line = capsys.readouterr().err
    assert line.startswith(printed) and line.count("\n") == 1
    with pytest.raises(ZeroDivisionError):
        main()


def test_every_error_of_the_vocabulary_says_what_to_do() -> None:
    without = []
    for path in (Path(__file__).parents[2] / "guard").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_error = isinstance(node, ast.Call) and ast.unparse(node.func) == "GuardError"
            if is_error and "remedy=" not in ast.unparse(node):
                without.append(f"{path}:{node.lineno}")
    assert without == []
