"""One group: a contrast pair of conversations from its dimensions. Knows nothing of splits' sizes, files or models.

The two conversations share every dimension (length, domain, distractors, position, severity, register, what is talked
about) and every utterance except the judged speaker's in the target, which violates the rule in one and does not in the
other. What the other speaker says there belongs to both acts: the phrase book names it in the `before` or `after` of each,
or it is the allowed act itself, where that is the other speaker's, and the violating act names it. So neither conversation
has an answer that misses its question. One kind of group differs more: where the allowed conversation never touches the
rule (`UNRELATED`), its whole target exchange is another one, and so is the word of transition around it.
No line of the books stands twice in a conversation.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from data.generator import grammar
from data.generator.dimensions import SEVERITIES, SHORTEST, UNRELATED, Dimensions
from data.generator.exchange import Around, Exchange, Exchanges, Turn, count_tokens
from data.generator.phrasebook import Corpus, Phrasebook, Pool
from data.generator.registers import ASSISTANT_REGISTERS, USER_REGISTERS
from data.generator.tricks import TRICKS
from guard.errors import GuardError
from guard.example import Example, Message, Split

WORDINGS = 8  # tries for a pair of targets whose lengths agree and fit
CLOSE_ENOUGH = (
    3  # tokens by which the two targets of a pair may differ before another wording is tried
)


@dataclass(frozen=True)
class Frame:
    """What both conversations of a group share."""

    system: str | None
    exchanges: tuple[Exchange, ...]
    hard_negatives: tuple[str, ...]
    distractors: tuple[str, ...]


class Writer:
    """Writes the conversations of one rule from one pool of phrases."""

    def __init__(self, corpus: Corpus, pool: Pool) -> None:
        self.corpus, self.pool = corpus, pool
        self.exchanges = Exchanges(corpus, pool)

    def group(self, dimensions: Dimensions, split: Split, key: str) -> list[Example]:
        """The contrast pair of `dimensions`, the violating conversation first."""
        rng = random.Random(key)
        targets = self._targets(dimensions, key, rng)
        frame = self._frame(dimensions, targets, key, rng)
        place = {"early": 0, "middle": len(frame.exchanges) // 2, "late": len(frame.exchanges)}[
            dimensions.position
        ]
        unanswered = (
            dimensions.target_tokens > 2 * SHORTEST
            and place == len(frame.exchanges)
            and dimensions.allowed_act != UNRELATED
            and all(len(target.around.after) == 1 for target in targets)
            and rng.random() < 0.3
        )
        examples = []
        for label, act, target in (
            (1, dimensions.violating_act, targets[0]),
            (0, dimensions.allowed_act, targets[1]),
        ):
            exchanges = [*frame.exchanges[:place], target, *frame.exchanges[place:]]
            messages = self._messages(
                frame.system,
                exchanges,
                dimensions,
                key,
                target.turns[min(targets[0].place, len(target.turns) - 1)],
            )
            said = [turn for exchange in exchanges for turn in exchange.turns]
            performed = [turn for turn in said if turn.core]
            messages = messages[: len(messages) - unanswered]
            meta = {
                **asdict(dimensions),
                "stratum": "seen" if self.pool == "seen" else "unseen",
                "difficulty": dimensions.difficulty,
                "wanders": self.corpus.book.wanders,
                "act": act,
                "stance": "unrelated" if act == UNRELATED else self.corpus.book.acts[act].stance,
                "context": next((turn.source for turn in target.turns if turn.source != act), ""),
                "acts": [None] * bool(frame.system)
                + [turn.act for turn in said][: len(said) - unanswered],
                "cores": [turn.core for turn in performed],
                "phrasings": [turn.phrasing for turn in performed],
                "hard_negative_acts": list(frame.hard_negatives),
                "distractor_acts": list(frame.distractors),
            }
            examples.append(
                Example(
                    id=f"{key}/{label}",
                    rule=self.corpus.rule.id,
                    messages=messages,
                    label=label,
                    split=split,
                    source="generator",
                    group=key,
                    meta=meta,
                )
            )
        return examples

    def _targets(
        self, dimensions: Dimensions, key: str, rng: random.Random
    ) -> tuple[Exchange, Exchange]:
        """The violating and the allowed exchange, chosen among several wordings so that their lengths agree and fit."""
        best: tuple[float, tuple[Exchange, Exchange]] | None = None
        for _ in range(WORDINGS):
            written = self._unrelated if dimensions.allowed_act == UNRELATED else self._contrast
            violating, allowed = written(dimensions, key, rng)
            excess = max(0, max(violating.tokens, allowed.tokens) - dimensions.target_tokens)
            cost = abs(violating.tokens - allowed.tokens) + excess
            if best is None or cost < best[0]:
                best = (cost, (violating, allowed))
            if cost <= CLOSE_ENOUGH:
                break
        assert best is not None
        return best[1]

    def _contrast(
        self, dimensions: Dimensions, key: str, rng: random.Random
    ) -> tuple[Exchange, Exchange]:
        """Both acts around the same words of the speaker who does not perform the violating one."""
        book, terse = self.corpus.book, _is_terse(dimensions)
        one, other = dimensions.violating_act, dimensions.allowed_act
        same_speaker = book.acts[one].speaker == book.acts[other].speaker
        shared = book.shared(one, other)
        context = shared if same_speaker else ()
        allowed = self.exchanges.act(
            book, other, dimensions.severity, key, rng, terse=terse, context=context
        )
        if allowed is None:
            raise GuardError(
                f"acts.{other}: no line supplies what its cores repeat",
                where=f"data/generator/phrases/{book.rule}.yaml",
                got=f"{', '.join(shared)} ({self.pool})",
                remedy=f"Add lines with the slots {', '.join(book.acts[other].supplied)}",
            )
        # Where the allowed act is what the other speaker says, the violating one takes the place of what stands there by its own.
        place = next(
            number
            for number, turn in enumerate(allowed.turns)
            if turn.role == book.acts[one].speaker
        )
        around = (
            allowed.around
            if same_speaker
            else Around(allowed.turns[:place], allowed.turns[place + 1 :])
        )
        violating = self.exchanges.act(
            book, one, dimensions.severity, key, rng, terse=terse, around=around
        )
        assert violating is not None  # nothing is taken yet
        return violating, allowed

    def _unrelated(
        self, dimensions: Dimensions, key: str, rng: random.Random
    ) -> tuple[Exchange, Exchange]:
        """The violating exchange, and what stands in its place when a conversation does not touch the rule."""
        book, others = self.corpus.book, self._others
        violating = self.exchanges.act(
            book,
            dimensions.violating_act,
            dimensions.severity,
            key,
            rng,
            terse=_is_terse(dimensions),
        )
        if others and rng.random() < 0.5:
            borrowed = rng.choice(others)
            allowed = self.exchanges.act(
                borrowed, rng.choice(list(borrowed.acts)), dimensions.severity, key, rng
            )
        else:
            allowed = self.exchanges.everyday(dimensions.domain, 1, f"{key}/unrelated", rng)[0]
        assert violating is not None  # nothing is taken yet
        assert allowed is not None
        return violating, allowed

    def _frame(
        self,
        dimensions: Dimensions,
        targets: tuple[Exchange, Exchange],
        key: str,
        rng: random.Random,
    ) -> Frame:
        """Everything around the target that both conversations of a group share, filled up to the length asked for."""
        taken = {line for target in targets for line in target.lines}
        system = self.exchanges.system(f"{key}/system", rng) if dimensions.has_system else None
        room = (
            dimensions.target_tokens
            - sum(target.tokens for target in targets) // 2
            - (count_tokens(system) if system else 0)
        )
        chosen: list[Exchange] = []
        kept: list[tuple[str, str]] = []
        for number, (book, act) in enumerate(self._acts_around(dimensions, rng)):
            exchange = self.exchanges.act(
                book, act, rng.choice(SEVERITIES[:2]), f"{key}/{number}", rng, taken=taken
            )
            if exchange is not None and exchange.tokens <= room:
                chosen.append(exchange)
                kept.append((book.rule, act))
                taken |= exchange.lines
                room -= exchange.tokens
        rng.shuffle(chosen)
        everyday = self._everyday(dimensions.domain, room, key, rng, taken)
        if (
            dimensions.target_tokens - room + sum(exchange.tokens for exchange in everyday)
            < 1.1 * SHORTEST
        ):
            taken |= {line for exchange in everyday for line in exchange.lines}
            everyday += self.exchanges.everyday(dimensions.domain, 1, f"{key}/more", rng, taken)
        own = self.corpus.rule.id
        return Frame(
            system,
            tuple(_interleave(everyday, chosen, rng)),
            tuple(act for rule, act in kept if rule == own),
            tuple(f"{rule}/{act}" for rule, act in kept if rule != own),
        )

    def _acts_around(
        self, dimensions: Dimensions, rng: random.Random
    ) -> list[tuple[Phrasebook, str]]:
        """The hard negatives, then the distractors."""
        allowed = self.corpus.acts(violating=False)
        wanted = [(self.corpus.book, rng.choice(allowed)) for _ in range(dimensions.hard_negatives)]
        others = [
            rng.choice(self._others) for _ in range(dimensions.distractors if self._others else 0)
        ]
        return wanted + [(book, rng.choice(list(book.acts))) for book in others]

    def _everyday(
        self, domain: str, room: int, key: str, rng: random.Random, taken: set[str]
    ) -> list[Exchange]:
        """Everyday exchanges of about `room` tokens: the conversation's own domain first, then it wanders, as far as the book allows."""
        book = self.corpus.book
        domains = [
            name
            for name in (self.corpus.background.domains if book.wanders else book.domains)
            if name != domain
        ]
        rng.shuffle(domains)
        written: list[Exchange] = []
        taken = set(taken)
        for name in (domain, *domains):
            wanted = self.exchanges.everyday(name, rng.randint(4, 7), key, rng, taken)
            if room > 25 and rng.random() < 0.4:
                wanted += self.exchanges.thanks(f"{key}/thanks/{name}", rng, taken)
            for exchange in wanted:
                if exchange.tokens <= room + 10 and (written or exchange.topic != "thanks"):
                    written.append(exchange)
                    taken |= exchange.lines
                    room -= exchange.tokens
            if room < 25:
                break
        return written

    def _messages(
        self,
        system: str | None,
        exchanges: Sequence[Exchange],
        dimensions: Dimensions,
        key: str,
        tricked: Turn,
    ) -> tuple[Message, ...]:
        """The exchanges in the speakers' registers, with a word of transition where the topic changes, and the trick on `tricked`."""
        messages = [Message("system", grammar.tidy(system))] if system else []
        previous = exchanges[0].topic
        for place, exchange in enumerate(exchanges):
            for number, turn in enumerate(exchange.turns):
                rng = random.Random(
                    f"{key}/{place}/{number}"
                )  # per turn, so that a pair's shared turns come out the same
                text = turn.text
                if (
                    number == 0
                    and exchange.topic not in (previous, "thanks")
                    and rng.random() < 0.5
                ):
                    text = (
                        grammar.resolve(rng.choice(self.corpus.background.transitions), rng)
                        + " "
                        + text
                    )
                if turn.role == "user":
                    text = USER_REGISTERS[dimensions.user_register](grammar.tidy(text), rng)
                elif turn.role == "assistant":
                    text = ASSISTANT_REGISTERS[dimensions.assistant_register](
                        grammar.tidy(text), rng
                    )
                if dimensions.trick and turn is tricked:
                    text = TRICKS[dimensions.trick](text, rng, self.pool)
                messages.append(Message(turn.role, text))
            previous = exchange.topic
        return tuple(messages)

    @property
    def _others(self) -> tuple[Phrasebook, ...]:
        """The books of other rules whose acts may stand in this one's conversations."""
        return self.corpus.others if self.corpus.book.wanders else ()


def _is_terse(dimensions: Dimensions) -> bool:
    return dimensions.user_register == "terse" or dimensions.target_tokens < 70


def _interleave(
    everyday: list[Exchange], chosen: list[Exchange], rng: random.Random
) -> list[Exchange]:
    """`chosen` at random places among `everyday`, whose own order is kept."""
    merged = list(everyday)
    for exchange in chosen:
        merged.insert(rng.randint(0, len(merged)), exchange)
    return merged
