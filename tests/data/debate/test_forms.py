import pytest

from data.debate.forms import ConversationDraft, Decomposition, Vote
from guard.errors import GuardError
from guard.files.yaml_file import validate


def test_what_a_model_adds_of_its_own_accord_is_left_out() -> None:
    vote = validate({"violates": True, "reason": "so", "confidence": 0.9}, Vote, where="here")
    assert vote.model_dump() == {"violates": True, "reason": "so"}


@pytest.mark.parametrize(
    ("form", "answer"),
    [
        (Vote, {"violates": "yes", "reason": "so"}),
        (ConversationDraft, {"messages": [], "reasoning": "so"}),
        (
            ConversationDraft,
            {"messages": [{"role": "narrator", "content": "once"}], "reasoning": "so"},
        ),
        (ConversationDraft, {"messages": [{"role": "user", "content": ""}], "reasoning": "so"}),
        (Decomposition, {"dimensions": [{"name": "tone", "values": ["a", "b"]}]}),
    ],
)
def test_an_answer_out_of_form_is_refused(form: type, answer: dict[str, object]) -> None:
    with pytest.raises(GuardError):
        validate(answer, form, where="here")
