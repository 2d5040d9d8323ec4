"""A second draw of the toy world's test rows. Tests only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from guard.conversation.example import Message, read_examples, write_examples
from tests.eval.conftest import World


def second_set(world: World, rule: str, *, words: str = "") -> Path:
    """The rule's test rows in other words, `words` among them, in another folder."""
    folder = world.runs.root / "second"
    rows = []
    for number, row in enumerate(read_examples(world.runs.data(rule) / "test.jsonl")):
        # the toy's rows differ in a number alone: what is not to count as near has to say more
        words_of_row = " ".join(
            f"word{chr(97 + number_of_word)}{chr(97 + number % 26)}{number // 26 * 'x'}"
            for number_of_word in range(20)
        )
        rows.append(
            replace(
                row,
                id=f"again-{row.id}",
                messages=(Message("user", f"{words} {words_of_row}"), *row.messages[1:]),
            )
        )
    (folder / rule).mkdir(parents=True)
    write_examples(folder / rule / "test.jsonl", rows)
    return folder
