"""Examples of random words, for tests of what measures examples."""

import random

from guard.conversation.example import Example, Message


def rows_of_random_words(telling: bool) -> list[Example]:
    """Random words; in the telling version one word gives the label away."""
    rng = random.Random(0)
    # No digits: a near duplicate may differ in those.
    words = ["w" + first + second for first in "abcdefgh" for second in "abcdefgh"]
    rows = []
    for number in range(400):
        label = number % 2
        text = [*rng.sample(words, 15), "secret" if telling and label else "plain"]
        split = "train" if number < 240 else "validation" if number < 280 else "test"
        rows.append(
            Example(
                f"e{number}",
                "r",
                (Message("user", " ".join(text)),),
                label,
                split,
                "s",
                f"g{number}",
                {"stratum": "real"},
            )  # type: ignore[arg-type]
        )
    return rows
