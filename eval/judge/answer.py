"""One answer of an LLM judge: the kept row, and whether it says yes.

Knows nothing of endpoints or labels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from guard.endpoint.client import Completion


@dataclass(frozen=True, kw_only=True)
class JudgeRow(Completion):
    """One kept answer on one example."""

    key: str
    id: str

    @property
    def violates(self) -> bool | None:
        """The decision; None where the answer is unparseable or there is none."""
        if self.refused:
            return None
        return parse_answer(self.text, cut_off=self.finish_reason == "length")


_NOT_A_CHOICE = r"(?!\s*(?:/|or\b|and\b))"  # "yes or no" repeats the question
# What follows a no that answers: "no, ...", "no (...", "no - ...", "no because", "no violation",
# "no it does not"; not "no doubt about it", "no-one", "no/yes".
_SAYS_SO = (
    r"(?=\W*$|\s*\n|\s*[^\w\s?/\u2010\u2011-]|\s+-|\s+(?:violation|because\b|since\b)"
    r"|\s+(?:it|they|(?:this|that|the)(?:\s+\w+){0,2})\s+"
    r"(?:do|does|did|is|was|has|have)(?:\s+not\b|n['\u2019]t\b))"
)
_LEADING = re.compile(rf"^\W*(?:(yes)\b{_NOT_A_CHOICE}|(no){_SAYS_SO})")
_LABELLED = re.compile(
    # "non-violation: true" says the opposite
    r"(?<!\bnon[-\u2010-\u2013 ])(?<!\bnot )(?<!\bno )(?<!\bnot a )"
    r"\b(?:answer|verdict|decision|violat(?:es|ion|ed)?)\b(?: the rule)?"
    r"[\s\"'*_`]*(?:is\b|[:=])[\s\"'*_`]*"
    rf"\b(yes|no|true|false)\b{_NOT_A_CHOICE}"
)
_LAST_LINE = re.compile(r"\n\W*(yes|no)\W*$")


def parse_answer(text: str, *, cut_off: bool = False) -> bool | None:
    """Whether a judge's words say yes (violates). None unless they say it clearly: "no doubt about
    it" is not a no.

    What counts is a yes or no at the beginning or on the last line, and a labelled one ("Verdict:
    **yes**", `{"violates": true}`). An answer that contradicts itself is None. Everything up to the
    last `</think>` is reasoning, with or without an opening tag, because the chat template may have
    written that tag. Of an answer that was `cut_off` only a yes or no at the beginning counts: the
    missing rest might contradict it.
    """
    words = text.lower().rpartition("</think>")[2].strip()
    if "<think>" in words:  # cut off while still reasoning
        return None
    leading = _LEADING.search(words)
    if cut_off and leading is None:
        return None
    ends = [match[match.lastindex or 0] for match in (leading, _LAST_LINE.search(words)) if match]
    decisions = {word in ("yes", "true") for word in [*ends, *_LABELLED.findall(words)]}
    if len(decisions) != 1:
        return None
    return decisions.pop()
