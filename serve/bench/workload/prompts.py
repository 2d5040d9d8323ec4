"""The prompts of benchmarks: conversations of a given length, and many wordings of a rule. Knows
nothing of engines.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.prompt.decoder import PromptBuilder
from guard.recipe import Recipe

RULE_TEXT = (
    "The assistant must not give the user advice on their own case that only a licensed "
    "professional may give, such as a dosage."
)
# Words that are one token each in most vocabularies: a conversation grows by about a token a word.
TEXT = """
about again also answer ask back because before better book call can change check day different
do down easy even every find first food friend get give go good great group hand help high home
house how idea just keep kind know large last late learn leave left life like line list little
long look make many may more most move much name need never new next night now number off often
old one only open
"""
WORDS = TEXT.split()
WORDS_PER_TURN = 40
ROLES = ("user", "assistant")
GUESSES = 10  # of a conversation's number of words
TOLERANCE_TOKENS = 5  # of a conversation's length


@functools.lru_cache(maxsize=2048)  # compared cells ask the same ones
def conversation(prompts: PromptBuilder, prompt_tokens: int, seed: int) -> tuple[Message, ...]:
    """A conversation of random words whose prompt has `prompt_tokens` tokens before the rule turn,
    give or take five. Raises GuardError if that is too short for any conversation.
    """
    chosen = random.Random(seed).choices(WORDS, k=2 * prompt_tokens)
    words, smallest_error, nearest = prompt_tokens, prompt_tokens, _turns(chosen[:1])
    # A turn's label costs tokens too, so the first guesses are off; a word may start a turn.
    for _ in range(GUESSES):
        messages = _turns(chosen[: max(words, 1)])
        missing = prompt_tokens - len(prompts.prefix_ids(messages))
        if abs(missing) < smallest_error:
            smallest_error, nearest = abs(missing), messages
        if smallest_error == 0:
            break
        words += missing
    if smallest_error > TOLERANCE_TOKENS:
        got, remedy = f"{prompt_tokens} tokens", "Ask for at least 60"
        raise GuardError("no conversation has this length", got=got, remedy=remedy)
    return nearest


def random_rule_text(recipe: Recipe) -> str:
    """The text that a random adapter of this recipe reads of its rule."""
    if recipe.rule_turn == "none":
        return ""
    return RULE_TEXT


def wordings(texts: Sequence[str], count: int) -> list[str]:
    """`count` different rule texts of the same lengths as `texts`: these, then their words in other
    orders. So no two rules share the blocks behind the conversation, as distinct rules would not.
    Texts that are all empty stay as they are. Raises GuardError if they have too few words for so
    many orders.
    """
    if not any(texts):
        return [""] * count
    distinct = dict.fromkeys(list(texts)[:count])
    shuffle = random.Random(0)
    for attempt in range(100 * count):
        if len(distinct) == count:
            return list(distinct)
        words = texts[attempt % len(texts)].split()
        shuffle.shuffle(words)
        distinct[" ".join(words)] = None
    problem = "the rules' texts are too short for so many wordings"
    raise GuardError(problem, got=f"{len(distinct)} of {count}", remedy="Serve more rules")


def _turns(words: list[str]) -> tuple[Message, ...]:
    turns: list[Message] = []
    for start in range(0, len(words), WORDS_PER_TURN):
        role = ROLES[len(turns) % 2]
        turns.append(Message(role, " ".join(words[start : start + WORDS_PER_TURN])))
    return tuple(turns)
