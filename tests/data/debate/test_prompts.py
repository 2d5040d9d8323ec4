"""What stands in the questions of a debate; kept answers are found by these very words."""

import json
from dataclasses import replace

from data.debate import prompts
from data.debate.prompts import ConversationDraft
from guard.conversation.example import Message
from guard.rule import in_words, load_rule

RULE = load_rule("refund_promise")
TURNS = [
    {"role": "user", "content": "Hello.\nMy lamp is broken."},
    {"role": "assistant", "content": "I see."},
]
DRAFT = ConversationDraft.model_validate_json(
    json.dumps({"messages": TURNS, "reasoning": "nothing is promised"})
)
CASE = "<conversation>\nUser: Hello.\n| My lamp is broken.\nAssistant: I see.\n</conversation>"


def _user(chat: prompts.Chat) -> str:
    assert [message["role"] for message in chat] == ["system", "user"]
    assert in_words(RULE) in chat[1]["content"]
    return chat[1]["content"]


def test_a_case_is_written_for_its_topic_and_again_with_the_dissent() -> None:
    seeds = [[Message("user", "Where is my lamp?")]]
    assert "User: Where is my lamp?" in _user(prompts.decompose(RULE, seeds))
    assert "<conversation>" not in _user(prompts.decompose(RULE, []))
    violating = prompts.Topic(7, "pretext", "a friend asks", 1)
    first = _user(prompts.write(RULE, violating, None, []))
    assert "pretext: a friend asks. It is case 7 of many" in first
    assert "conversation that VIOLATES the policy" in first and '"why it VIOLATES"' in first
    assert "does NOT violate" in _user(prompts.write(RULE, replace(violating, label=0), None, []))
    again = _user(prompts.write(RULE, violating, DRAFT, ["too plain"]))
    assert "Your last attempt:" in again and "- too plain" in again


def test_advocate_and_judges_see_the_case_and_what_was_said() -> None:
    for label, claim in ((0, "does not violate the policy"), (1, "violates the policy")):
        text = _user(prompts.advocate(RULE, DRAFT, label, ["Judge (recall): no"]))
        assert CASE in text and claim in text and "Judge (recall): no" in text
    systems = set()
    for leaning in prompts.LEANINGS:
        chat = prompts.judge(RULE, DRAFT, leaning, [])
        assert CASE in _user(chat) and "What was said so far" not in _user(chat)
        systems.add(chat[0]["content"])
    assert len(systems) == 2
