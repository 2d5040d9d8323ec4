"""Rows for a rule that looks in the last turn alone (`turns: last`), from those for any turn.

The two conversations of a group end with the turn in which they differ. Of one group in so many,
where it has one, the next turn of whom the rule judges follows as well, and both are allowed: what
violates stands there, and is not the last. Knows nothing of phrases.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from guard.example import Example
from guard.prompt.encoder import SPEAKERS
from guard.rule import Rule

GOES_ON = 0.25  # the share of the groups that go on


def on_last_turn(pair: Sequence[Example], rule: Rule) -> list[Example]:
    """The pair, the violating conversation first, as rows of a rule on the last turn; of any other
    rule as it is.
    """
    if rule.turns != "last":
        return list(pair)
    goes_on = random.Random(f"{pair[0].group}/goes on").random() < GOES_ON
    rows: list[Example] = []
    act_turn = 0
    for example in pair:
        act_turn = _act_turn(example, otherwise=act_turn)
        judged = _judged_turns(example, rule) or [len(example.messages) - 1]
        target = max((turn for turn in judged if turn <= act_turn), default=judged[0])
        later = [turn for turn in judged if turn > target]
        if goes_on and later:
            rows.append(replace(_until(example, later[0]), label=0))
        else:
            rows.append(_until(example, target))
    return rows


def _act_turn(example: Example, otherwise: int) -> int:
    """The turn of the conversation's act; one that never touches the rule has none."""
    act = f"{example.rule}/{example.meta['act']}"
    acts = example.meta["acts"]
    return acts.index(act) if act in acts else otherwise


def _judged_turns(example: Example, rule: Rule) -> list[int]:
    speakers = SPEAKERS[rule.reads]
    return [turn for turn, message in enumerate(example.messages) if message.role in speakers]


def _until(example: Example, last: int) -> Example:
    """The conversation's beginning, with what its row says of how it was made."""
    meta = dict(example.meta)
    meta["acts"] = meta["acts"][: last + 1]
    performed = sum(act is not None for act in meta["acts"])
    for of_performed in ("cores", "phrasings"):
        meta[of_performed] = meta[of_performed][:performed]
    return replace(example, messages=example.messages[: last + 1], meta=meta)
