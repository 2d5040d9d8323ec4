"""What a rule's validation rows cover: see `guard/coverage.py`. Knows nothing of models."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import numpy as np
from scipy.stats import nct, norm

from data.long_turns import LongTurns, long_length
from guard.conversation.example import LONG_TURN, Example, read_examples
from guard.coverage import (
    ConversationForm,
    Coverage,
    is_word,
    packed_words,
    tokens_of,
    unpacked_words,
    word_hash,
)
from guard.layout import split_files
from guard.prompt.decoder import Prompt
from guard.rule import Rule
from train.job import Job

USUAL_SHARE = 0.95  # of the validation rows have no more unknown text, and languages, than covered
MOST_UNKNOWN = 0.6  # of a stretch, whatever the rows have
MOST_WORDS = 2**14  # that are known: the commonest, so that the field of their hashes stays sparse
MISSED_SHARE, CERTAINTY = 0.01, 0.95  # of violating rows below the logit of a sure "allow"
FEWEST_VIOLATING = 5  # rows from which that logit is computed
LONG_ROWS = 60  # violating validation rows that are written with a long turn
REACHING = 10  # rows reach the length that is covered, and tell which languages are


def covered_by(
    job: Job, logits: Sequence[float], logits_of: Callable[[Sequence[Prompt]], list[float]]
) -> Coverage:
    """What a job's validation rows cover: `logits` are theirs, `logits_of` gives other prompts', in
    nats. Prints that no "allow" will be confident where the rows are too few for that.
    """
    training, validation, _ = map(read_examples, split_files(job.data))
    longest = job.recipe.context_tokens - job.builder.verdict_tokens
    long: list[Example] = []
    prompts: list[Prompt] = []
    for row in long_rows(job.rule, validation):
        prompt = job.builder.build(row.messages, job.rule_text)
        if len(prompt.token_ids) <= longest:
            long.append(row)
            prompts.append(prompt)
    covered = coverage(training, validation, logits, long, logits_of(prompts))
    if covered.sure_logit is None:
        print(
            f'{job.name}: no "allow" will be confident: that takes {FEWEST_VIOLATING} violating '
            "validation rows without a long turn",
            flush=True,
        )
    return covered


def long_rows(rule: Rule, validation: Sequence[Example]) -> list[Example]:
    """Violating validation rows with a long turn: LONG_ROWS, or as many as there are."""
    rng = random.Random(f"{rule.id}/long validation rows")
    violating = [example for example in validation if example.label]
    writer = LongTurns.amid_allowed(rule, validation)
    rows: list[Example] = []
    for number, example in enumerate(rng.sample(violating, min(LONG_ROWS, len(violating)))):
        position = writer.positions[number % len(writer.positions)]
        row = writer.written(example, position, long_length(rng), rng)
        if row is not None:
            rows.append(row)
    return rows


def coverage(
    training: Sequence[Example],
    validation: Sequence[Example],
    logits: Sequence[float],
    long: Sequence[Example],
    long_logits: Sequence[float],
) -> Coverage:
    """What validation rows and violating rows with a long turn cover, from their logits in nats."""
    words, letters = _known(training)
    packed = packed_words([word_hash(word) for word in words])
    field = unpacked_words(packed)
    forms = [ConversationForm(row.messages) for row in validation]
    shares: list[float] = []
    for row, form in zip(validation, forms, strict=True):
        if not row.meta.get("trick"):  # what misleads a judge is not usual
            shares.append(form.unknown_share(field, letters))
    all_forms = [*forms, *(ConversationForm(row.messages) for row in long)]
    violating: dict[bool, list[float]] = {False: [], True: []}  # by whether a turn is long
    rows = [*validation, *long]
    for row, form, logit in zip(rows, all_forms, [*logits, *long_logits], strict=True):
        # Of generated rows those in phrasings that training has not shown, as people's are.
        if row.label and row.meta.get("stratum") != "seen":
            violating[form.has_long_turn].append(logit)
    usual = float(np.quantile(shares, USUAL_SHARE)) if shares else 0.0
    return Coverage(
        turns=_reached([form.turns for form in all_forms]),
        characters=_reached([form.characters for form in all_forms]),
        longest_turns=_longest_turns(forms, all_forms),
        speakers=tuple(sorted(set.intersection(*(set(form.longest_turns) for form in forms)))),
        unknown_share=min(usual, MOST_UNKNOWN),
        words=packed,
        letters="".join(sorted(letters)),
        sure_logit=sure_logit(violating[False]),
        sure_logit_long=sure_logit(violating[True]),
        languages=_languages([form for form in forms if form.languages]),
    )


def sure_logit(violating: Sequence[float]) -> float | None:
    """The logit below which an "allow" is sure, from those of violating rows; None where these are
    too few. It is the lowest of them, or, where that is lower, the one-sided normal tolerance
    bound: with CERTAINTY at most MISSED_SHARE of such rows are below (Hahn and Meeker, 1991). The
    fewer rows, the lower it is.
    """
    rows = len(violating)
    if rows < FEWEST_VIOLATING:
        return None
    logits = np.asarray(violating, np.float64)
    root = rows**0.5
    factor = nct.ppf(CERTAINTY, rows - 1, norm.ppf(1 - MISSED_SHARE) * root) / root
    return float(min(logits.min(), logits.mean() - factor * logits.std(ddof=1)))


def _known(training: Sequence[Example]) -> tuple[list[str], frozenset[str]]:
    """The words of the training rows, the commonest MOST_WORDS, and their letters beyond ASCII."""
    rows_with: Counter[str] = Counter()
    for row in training:
        rows_with.update(
            {token for message in row.messages for token in tokens_of(message.content)}
        )
    letters: set[str] = set()
    for token in rows_with:
        letters.update(sign for sign in token if sign.isalpha() and not sign.isascii())
    words = [token for token, _ in rows_with.most_common() if is_word(token)]
    return words[:MOST_WORDS], frozenset(letters)


def _languages(telling: Sequence[ConversationForm]) -> tuple[str, ...] | None:
    """The likeliest languages of rows that tell theirs, as few as cover USUAL_SHARE of the rows: so
    a row whose language is mistaken adds none. None where fewer than REACHING rows tell.
    """
    if len(telling) < REACHING:
        return None
    weights: defaultdict[str, float] = defaultdict(float)
    for form in telling:
        for probabilities in form.languages:
            for language, probability in probabilities.items():
                weights[language] += probability / len(form.languages)
    languages: list[str] = []
    for language in sorted(weights, key=weights.__getitem__, reverse=True):
        languages.append(language)
        if sum(not form.is_unseen(languages) for form in telling) >= USUAL_SHARE * len(telling):
            return tuple(sorted(languages))
    return None


def _longest_turns(
    forms: Sequence[ConversationForm], all_forms: Sequence[ConversationForm]
) -> dict[str, int]:
    """The longest turns by speaker that are covered: those that REACHING rows reach, and of whoever
    speaks in the validation rows at least a turn that is not long.
    """
    longest: dict[str, int] = {}
    speakers = {speaker for form in all_forms for speaker in form.longest_turns}
    for speaker in sorted(speakers):
        lengths = [
            form.longest_turns[speaker] for form in all_forms if speaker in form.longest_turns
        ]
        longest[speaker] = _reached(lengths)
        if any(speaker in form.longest_turns for form in forms):
            longest[speaker] = max(longest[speaker], LONG_TURN)
    return longest


def _reached(lengths: Sequence[int]) -> int:
    """The length that REACHING of the rows reach; of fewer rows, that all of them reach."""
    longest = sorted(lengths, reverse=True)[:REACHING]
    return min(longest, default=0)
