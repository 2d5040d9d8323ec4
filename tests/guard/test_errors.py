"""The error users see."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import pytest

from guard.errors import GuardError, choose_from, did_you_mean, exits_cleanly


def test_an_error_says_what_where_got_and_remedy_and_crosses_a_process_boundary_whole() -> None:
    error = GuardError("unknown role", where="train.jsonl:3", got="bot", remedy="Use user")
    assert str(error) == "train.jsonl:3: unknown role (got bot). Use user"
    assert str(GuardError("just this")) == "just this"
    sent = GuardError("unknown role", where="here", got=0, remedy="Use user")
    error = pickle.loads(pickle.dumps(sent))
    assert str(error) == str(sent) == "here: unknown role (got 0). Use user"
    assert vars(error) == vars(sent)


def test_the_nearest_name_is_named_and_a_strange_one_gets_the_list_alone() -> None:
    names = ["lora", "alora"]
    assert did_you_mean("alorra", iter(names)) == "Did you mean 'alora'?"
    assert did_you_mean("zzz", names) == ""
    assert choose_from("alorra", iter(names)) == "Did you mean 'alora'? Known: lora, alora"
    assert choose_from("zzz", names) == "Known: lora, alora"
    assert choose_from("zzz", ()) == "Known: none"


INTERRUPTED = "interrupted; give the same command again (without FORCE): what was finished is kept"


@pytest.mark.parametrize(
    ("raised", "status", "printed"),
    [
        (GuardError("broken", where="here"), 2, "error: here: broken"),
        (KeyboardInterrupt(), 130, INTERRUPTED),
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
    assert capsys.readouterr().err == f"{printed}\n"
    with pytest.raises(ZeroDivisionError):
        main()


def test_every_error_of_the_vocabulary_says_what_to_do() -> None:
    calls = [
        (f"{path.name}:{node.lineno}", {keyword.arg for keyword in node.keywords})
        for path in (Path(__file__).parents[2] / "guard").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "GuardError"
    ]
    assert len(calls) > 20
    assert [where for where, given in calls if "remedy" not in given] == []
