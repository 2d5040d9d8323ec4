import pytest

from data.llm_reply import Form, filled, words
from guard.endpoint import Completion
from guard.errors import GuardError


class Colour(Form):
    name: str


def _completion(text: str, finish_reason: str = "stop") -> Completion:
    return Completion(text, 1, 1, 1.0, finish_reason)


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "red"}',
        'Sure:\n```json\n{"name": "red", "why": "as asked"}\n```',
        'a {brace}, then {"name": "red"} and {"name": "blue"}',
        '<think>{"name": "blue"}</think> {"name": "red"}',
    ],
)
def test_the_first_object_of_an_answer_is_read_whatever_stands_around_it(text: str) -> None:
    assert filled(_completion(text), Colour, "here").name == "red"


@pytest.mark.parametrize("text", ["red", '{"name": 1}', "{}", "<think>so", " "])
def test_an_answer_out_of_form_is_refused(text: str) -> None:
    with pytest.raises((ValueError, GuardError)):
        filled(_completion(text), Colour, "here")


def test_an_answer_that_was_cut_off_or_holds_half_a_character_is_refused() -> None:
    assert words(_completion(" fine ")) == "fine"
    with pytest.raises(ValueError, match="cut off"):
        words(_completion("fine", "length"))
    with pytest.raises(UnicodeEncodeError):
        words(_completion("half \ud83d"))
