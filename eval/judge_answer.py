"""One answer of an LLM judge: what was kept of it, and whether it says yes. Knows nothing of endpoints or labels."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class JudgeRow:
    """One kept answer of the endpoint, as it came. Token counts and the finish reason are None where the endpoint reports none.

    `refused`: the endpoint will not take this conversation (too long, flagged), and `text` is what it said, shortened.
    """

    key: str
    id: str
    text: str
    prompt_tokens: int | None
    completion_tokens: int | None
    latency_ms: float  # of the attempt that succeeded
    finish_reason: str | None = None
    refused: bool = False

    @property
    def violates(self) -> bool | None:
        """The decision; None where the answer is unparseable or there is none."""
        return None if self.refused else parse_answer(self.text, cut_off=self.finish_reason == "length")


def read_completion(key: str, example_id: str, completion: Any, latency_ms: float) -> JudgeRow:
    """The row of a chat completion. Raises KeyError, IndexError or TypeError where it is none."""
    choice = completion["choices"][0]
    text, finish_reason = choice["message"]["content"], choice.get("finish_reason")
    if not isinstance(text, str | None):
        raise TypeError(f"the content is {type(text).__name__}, not text")
    usage = completion.get("usage")
    prompt_tokens, completion_tokens = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    # a null content is an answer too: the model refused, or spent all its tokens on reasoning
    finish_reason = finish_reason if isinstance(finish_reason, str) else None
    return JudgeRow(key, example_id, text or "", prompt_tokens, completion_tokens, latency_ms, finish_reason)


_NOT_A_CHOICE = r"(?!\s*(?:/|or\b|and\b))"  # "yes or no" repeats the question
_SAYS_SO = (  # what follows a no that answers: "no, ...", "no - ...", "no violation", "no it does not"; not "no doubt about it"
    r"(?=\W*$|\s*[.,:;!*\n\"']|\s+[-\u2013\u2014]|\s+violation"
    r"|\s+(?:it|this|that|they|the \w+)\s+(?:do|does|did|is|was|has|have)(?:\s+not\b|n['\u2019]t\b))"
)
_LEADING = re.compile(rf"^\W*(?:(yes)\b{_NOT_A_CHOICE}|(no){_SAYS_SO})")
_LABELLED = re.compile(
    r"(?<!\bnon[-\u2010-\u2013 ])(?<!\bnot )(?<!\bno )(?<!\bnot a )"  # "non-violation: true" says the opposite
    r"\b(?:answer|verdict|decision|violat(?:es|ion|ed)?)\b(?: the rule)?[\s\"'*_`]*(?:is\b|[:=])[\s\"'*_`]*"
    rf"\b(yes|no|true|false)\b{_NOT_A_CHOICE}"
)
_LAST_LINE = re.compile(r"\n\W*(yes|no)\W*$")


def parse_answer(text: str, *, cut_off: bool = False) -> bool | None:
    """Whether a judge's words say yes (violates). None unless they say so once and for all: "no doubt about it" is not a no.

    Taken as an answer: a leading or a last line's yes or no, and a labelled one ("Verdict: **yes**", `{"violates": true}`);
    an answer that contradicts itself is none. Everything up to the last `</think>` is reasoning, with or without an opening tag,
    because chat templates may have written that. Of an answer that was `cut_off` only a leading yes or no counts: the rest might
    have changed its mind.
    """
    said = text.lower().rpartition("</think>")[2].strip()
    if "<think>" in said:  # cut off while still reasoning
        return None
    leading = _LEADING.search(said)
    if cut_off and leading is None:
        return None
    ends = [match[match.lastindex or 0] for match in (leading, _LAST_LINE.search(said)) if match]
    decisions = {word in ("yes", "true") for word in [*ends, *_LABELLED.findall(said)]}
    return decisions.pop() if len(decisions) == 1 else None


def _count(usage: Any, name: str) -> int | None:
    """A token count, None where there is none or it is not one."""
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
