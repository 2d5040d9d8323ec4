"""The offline generator: a rule's dimensions -> labelled conversations. Knows nothing of files, models or tokenizers.

A *group* is a contrast pair: two conversations that share every dimension (length, domain, distractors, position,
severity, register, what is talked about) and every utterance except the target's, which violates the rule in one and
does not in the other. The label follows from that act alone (`Act.violates`), so nothing else can tell it. The words of
the speaker who is not judged are the same in both, too; only a conversation that never touches the rule differs more.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from tqdm import tqdm

from data import grammar
from data.phrasebook import Act, Background, Phrasebook, Pool, line_id, load_background, load_phrasebook, pool_of, slot_pool
from data.splits import near_duplicates
from guard.errors import GuardError
from guard.example import Example, Message, Split
from guard.rule import Rule

SHORTEST, LONGEST = 50, 1950  # tokens; the estimate below may be a few per cent too low
LOG_MEAN, LOG_SPREAD = math.log(80), 1.2  # of the length's normal distribution in log space, before it is cut to the bounds
SEVERITIES = ("plain", "hedged", "buried")
POSITIONS = ("early", "middle", "late")
UNRELATED = "unrelated"  # the allowed act of a conversation that does not touch the rule at all
UNRELATED_SHARE = 0.08
CLOSE_ENOUGH = 3  # tokens by which the two targets of a pair may differ before another wording is tried
REWRITES = 10  # how often a conversation that came out too close to another is worded anew

Severity = Literal["plain", "hedged", "buried"]
Position = Literal["early", "middle", "late"]


@dataclass(frozen=True)
class Counts:
    """How many examples to write per split; the test is half `seen`, half `unseen`."""

    train: int = 4800
    validation: int = 400
    test: int = 400


@dataclass(frozen=True)
class Dimensions:
    """Everything that is sampled about a group before a word of it is written."""

    violating_act: str
    allowed_act: str
    domain: str
    severity: Severity
    position: Position
    hard_negatives: int  # further allowed acts of the same rule in both conversations
    distractors: int  # acts of other rules in both conversations
    user_register: str
    assistant_register: str
    has_system: bool
    target_tokens: int


@dataclass(frozen=True)
class Turn:
    """One utterance before it is tidied: roles and words, no capitals."""

    role: str
    text: str


@dataclass(frozen=True)
class Exchange:
    """A user's utterance and the answer to it; `core` and `phrasing` name how the act in it was worded."""

    turns: tuple[Turn, ...]
    topic: str
    core: str = ""
    phrasing: str = ""

    @property
    def tokens(self) -> int:
        """Estimated length."""
        return sum(count_tokens(turn.text) for turn in self.turns)


@dataclass(frozen=True)
class Corpus:
    """All phrases the generator draws from for one rule."""

    rule: Rule
    book: Phrasebook
    others: tuple[Phrasebook, ...]
    background: Background


def load_corpus(rule: Rule, others: Sequence[Rule]) -> Corpus:
    """The rule's own phrases, those of `others` as distractors, and everyday talk."""
    background = load_background()
    books = tuple(book for other in others if other.id != rule.id and (book := load_phrasebook(other, background)).borrows)
    return Corpus(rule, load_phrasebook(rule, background), books, background)


def generate(corpus: Corpus, counts: Counts, seed: int) -> list[Example]:
    """Groups of two examples (one of each label), in a stable order; the same seed writes the same text.

    A group that comes out too close to an earlier one is written anew, so no near duplicates remain, within splits or
    across. Raises GuardError if the phrases are too few for that many examples.
    """
    jobs = list(_jobs(corpus, counts, seed))
    groups = [job.write(0) for job in tqdm(jobs, desc=f"writing {corpus.rule.id}", unit=" pairs", leave=False)]
    for attempt in itertools.count(1):
        examples = [example for group in groups for example in group]
        clashing = sorted({pair.second // 2 for pair in near_duplicates(examples)})
        if not clashing:
            break
        if attempt > REWRITES:
            raise GuardError(
                f"{len(clashing)} conversations are still near duplicates after {REWRITES} attempts",
                where=f"data/phrases/{corpus.rule.id}.yaml",
                remedy="Ask for fewer examples, or add cores and slot values",
            )
        for number in clashing:
            groups[number] = jobs[number].write(attempt)
    return examples


@dataclass(frozen=True)
class Job:
    """One group to write."""

    writer: Writer
    dimensions: Dimensions
    split: Split
    key: str

    def write(self, attempt: int) -> list[Example]:
        """The group, worded differently in every attempt."""
        return self.writer.group(self.dimensions, self.split, f"{self.key}~{attempt}" if attempt else self.key)


def _jobs(corpus: Corpus, counts: Counts, seed: int) -> Iterator[Job]:
    half = counts.test // 2
    parts: tuple[tuple[Split, Pool, int], ...] = (
        ("train", "seen", counts.train),
        ("validation", "seen", counts.validation),
        ("test", "seen", half),
        ("test", "unseen", counts.test - half),
    )
    for split, pool, examples in parts:
        writer = Writer(corpus, pool)
        name = f"{corpus.rule.id}/{seed}/{split}/{pool}"
        for number, dimensions in enumerate(sample_dimensions(corpus, examples // 2, random.Random(name))):
            yield Job(writer, dimensions, split, f"{name}/{number}")


def sample_dimensions(corpus: Corpus, groups: int, rng: random.Random) -> list[Dimensions]:
    """Independent draws of every dimension; acts come in balanced rounds so that none is rare."""
    acts, judged = corpus.book.acts, corpus.rule.judged
    violating = _rounds([name for name, act in acts.items() if act.violates(judged)], groups, rng)
    related = [name for name, act in acts.items() if not act.violates(judged)]
    allowed = _rounds(related, groups, rng)
    domains = corpus.book.domains or tuple(corpus.background.domains)
    rows = []
    for one, other in zip(violating, allowed, strict=True):
        tokens = sample_length(rng)
        room = tokens // 120  # how many exchanges of interest fit besides the target
        rows.append(
            Dimensions(
                violating_act=one,
                allowed_act=UNRELATED if rng.random() < UNRELATED_SHARE else other,
                domain=rng.choice(domains),
                severity=rng.choice(SEVERITIES if tokens > 110 else SEVERITIES[:2]),  # type: ignore[arg-type]
                position=rng.choice(POSITIONS),  # type: ignore[arg-type]
                hard_negatives=rng.randint(0, min(3, room)),
                distractors=rng.randint(0, min(3, room)),
                user_register=rng.choice(list(USER_REGISTERS)),
                assistant_register=rng.choice(list(ASSISTANT_REGISTERS)),
                has_system=tokens > 80 and rng.random() < 0.25,
                target_tokens=tokens,
            )
        )
    return rows


def sample_length(rng: random.Random) -> int:
    """A conversation length in tokens: log-normal, cut to SHORTEST..LONGEST (median about 130, mean about 220)."""
    while True:
        tokens = round(math.exp(rng.gauss(LOG_MEAN, LOG_SPREAD)))
        if SHORTEST <= tokens <= LONGEST:
            return tokens


def count_tokens(text: str) -> int:
    """Estimated tokens of one turn with its role label: words, punctuation and digits, and a little for rare words."""
    return round(1.06 * len(re.findall(r"[A-Za-z]+|\d{1,3}|[^\w\s]", text))) + 3


class Writer:
    """Writes the conversations of one rule from one pool of phrases."""

    def __init__(self, corpus: Corpus, pool: Pool) -> None:
        self.corpus, self.pool = corpus, pool
        self._slots = {book.rule: slot_pool(book.slots, pool) for book in (corpus.book, *corpus.others)}
        self._background_slots = slot_pool(corpus.background.slots, pool)

    def group(self, dimensions: Dimensions, split: Split, key: str) -> list[Example]:
        """The contrast pair of `dimensions`, the violating conversation first."""
        rng = random.Random(key)
        targets = self._targets(dimensions, key, rng)
        frame = self._frame(dimensions, sum(target.tokens for target in targets) // 2, key, rng)
        place = {"early": 0, "middle": len(frame.exchanges) // 2, "late": len(frame.exchanges)}[dimensions.position]
        ends_on_user = (
            dimensions.target_tokens > 2 * SHORTEST
            and place == len(frame.exchanges)
            and self._both_by_user(dimensions)
            and rng.random() < 0.3
        )
        examples = []
        for label, act, target in ((1, dimensions.violating_act, targets[0]), (0, dimensions.allowed_act, targets[1])):
            exchanges = [*frame.exchanges[:place], target, *frame.exchanges[place:]]
            messages = self._messages(frame.system, exchanges, dimensions, key)
            meta = {
                **asdict(dimensions),
                "stratum": self.pool,
                "act": act,
                "stance": "unrelated" if act == UNRELATED else self.corpus.book.acts[act].stance,
                "cores": [exchange.core for exchange in exchanges if exchange.core],
                "phrasings": [exchange.phrasing for exchange in exchanges if exchange.phrasing],
                "hard_negative_acts": list(frame.hard_negatives),
                "distractor_acts": list(frame.distractors),
            }
            examples.append(
                Example(
                    id=f"{key}/{label}",
                    rule=self.corpus.rule.id,
                    messages=messages[: len(messages) - ends_on_user],
                    label=label,
                    split=split,
                    source="generator",
                    group=key,
                    meta=meta,
                )
            )
        return examples

    def exchange(
        self,
        book: Phrasebook,
        name: str,
        severity: Severity,
        key: str,
        rng: random.Random,
        *,
        terse: bool = False,
        other: Turn | None = None,
    ) -> Exchange:
        """One act of `book` with what the other speaker says before or after it: `other`, or one of the act's own lines.

        Exchanges with one `key` share their slot values.
        """
        act = book.acts[name]
        bindings = grammar.Bindings(self._slots[book.rule], key)
        core = rng.choice(pool_of(act.cores, self.pool))
        phrasing = " ".join(self._around(book, act, grammar.resolve(core, rng), severity, rng, terse=terse))
        own = Turn(act.speaker, bindings.fill(phrasing))
        if other is None:
            line = rng.choice(pool_of(book.lines[rng.choice(act.before or act.after)], self.pool))
            other = Turn("user" if act.before else "assistant", bindings.fill(grammar.resolve(line, rng)))
        turns = (other, own) if act.before else (own, other)
        return Exchange(turns, book.rule, f"{book.rule}/{name}/{line_id(core)}", f"{book.rule}/{name}/{line_id(phrasing)}")

    def _around(self, book: Phrasebook, act: Act, core: str, severity: Severity, rng: random.Random, *, terse: bool) -> list[str]:
        """Opening, softener, core, closing; a buried core stands between sentences that have nothing to do with it."""

        def part(name: str) -> str:
            return grammar.resolve(rng.choice(book.parts[name]), rng)

        sentence = f"{part(act.softener)} {core}" if severity == "hedged" else core
        before = [part(act.opening)] if not terse and severity != "hedged" and rng.random() < 0.5 else []
        after = [part(act.closing)] if not terse and rng.random() < 0.4 else []
        if severity == "buried":
            padding = [grammar.resolve(line, rng) for line in rng.sample(book.parts[act.padding], 3)]
            cut = rng.randint(1, 2)
            before, after = before + [_stop(line) for line in padding[:cut]], [_stop(line) for line in padding[cut:]] + after
        return [*before, _stop(sentence), *after]

    def _targets(self, dimensions: Dimensions, key: str, rng: random.Random) -> tuple[Exchange, Exchange]:
        """The violating and the allowed exchange, chosen among several wordings so that their lengths agree and fit."""
        book = self.corpus.book
        speaker = book.acts[dimensions.violating_act].speaker
        terse = dimensions.user_register == "terse" or dimensions.target_tokens < 70
        best: tuple[float, tuple[Exchange, Exchange]] | None = None
        for _ in range(8):
            if dimensions.allowed_act == UNRELATED:
                allowed, other = self._unrelated(dimensions, key, rng), None
            else:
                allowed = self.exchange(book, dimensions.allowed_act, dimensions.severity, key, rng, terse=terse)
                other = next((turn for turn in allowed.turns if self._fits_both(turn, allowed, speaker)), None)
            violating = self.exchange(book, dimensions.violating_act, dimensions.severity, key, rng, terse=terse, other=other)
            excess = max(0, max(violating.tokens, allowed.tokens) - dimensions.target_tokens)
            cost = abs(violating.tokens - allowed.tokens) + excess
            if best is None or cost < best[0]:
                best = (cost, (violating, allowed))
            if cost <= CLOSE_ENOUGH:
                break
        assert best is not None
        return best[1]

    def _fits_both(self, turn: Turn, allowed: Exchange, speaker: str) -> bool:
        """Whether the violating exchange can take over this turn of the allowed one, `speaker` being who violates.

        It must be the other speaker's; and an assistant that itself acted in the allowed exchange answers a question
        there that a violating user does not ask.
        """
        act = self.corpus.book.acts[allowed.core.split("/")[1]]
        return turn.role != speaker and (speaker == "assistant" or act.speaker == "user")

    def _unrelated(self, dimensions: Dimensions, key: str, rng: random.Random) -> Exchange:
        """What stands in the target's place when a conversation does not touch the rule."""
        if self.corpus.others and rng.random() < 0.5:
            book = rng.choice(self.corpus.others)
            return self.exchange(book, rng.choice(list(book.acts)), dimensions.severity, key, rng)
        return self._background(dimensions.domain, 1, key, rng)[0]

    def _frame(self, dimensions: Dimensions, taken: int, key: str, rng: random.Random) -> Frame:
        """Everything around the target that both conversations of a group share, filled up to the length asked for."""
        background = self.corpus.background
        slots = grammar.Bindings(self._background_slots, f"{key}/system")
        system = slots.fill(grammar.resolve(rng.choice(background.systems), rng)) if dimensions.has_system else None
        room = dimensions.target_tokens - taken - (count_tokens(system) if system else 0)
        chosen: list[Exchange] = []
        allowed = [name for name, act in self.corpus.book.acts.items() if not act.violates(self.corpus.rule.judged)]
        wanted = [(self.corpus.book, rng.choice(allowed)) for _ in range(dimensions.hard_negatives)]
        others = [rng.choice(self.corpus.others) for _ in range(dimensions.distractors if self.corpus.others else 0)]
        wanted += [(book, rng.choice(list(book.acts))) for book in others]
        kept: list[tuple[str, str]] = []
        for number, (book, act) in enumerate(wanted):
            exchange = self.exchange(book, act, rng.choice(SEVERITIES[:2]), f"{key}/{number}", rng)  # type: ignore[arg-type]
            if exchange.tokens <= room:
                chosen.append(exchange)
                kept.append((book.rule, act))
                room -= exchange.tokens
        rng.shuffle(chosen)
        everyday = self._everyday(dimensions.domain, room, key, rng)
        room -= sum(exchange.tokens for exchange in everyday)
        if dimensions.target_tokens - room < 1.1 * SHORTEST:
            everyday += self._background(dimensions.domain, 1, f"{key}/more", rng)
        exchanges = _interleave(everyday, chosen, rng)
        own = self.corpus.rule.id
        return Frame(
            system,
            tuple(exchanges),
            tuple(act for rule, act in kept if rule == own),
            tuple(f"{rule}/{act}" for rule, act in kept if rule != own),
        )

    def _everyday(self, domain: str, room: int, key: str, rng: random.Random) -> list[Exchange]:
        """Background exchanges of about `room` tokens: the conversation's own domain first, then it wanders."""
        domains = [name for name in self.corpus.background.domains if name != domain]
        rng.shuffle(domains)
        written: list[Exchange] = []
        for name in (domain, *domains):
            for exchange in self._background(name, rng.randint(4, 7), key, rng):
                if exchange.tokens <= room + 10:
                    written.append(exchange)
                    room -= exchange.tokens
            if room > 25 and written and rng.random() < 0.4:
                thanks = self._plain(rng.choice(self.corpus.background.thanks), "thanks", f"{key}/thanks/{name}", rng)
                written.append(thanks)
                room -= thanks.tokens
            if room < 25:
                break
        return written

    def _background(self, domain: str, most: int, key: str, rng: random.Random) -> list[Exchange]:
        lines = self.corpus.background.domains[domain]
        chosen = rng.sample(lines, min(most, len(lines)))
        return [self._plain(line, domain, f"{key}/{domain}/{number}", rng) for number, line in enumerate(chosen)]

    def _plain(self, line: str, topic: str, key: str, rng: random.Random) -> Exchange:
        bindings = grammar.Bindings(self._background_slots, key)
        texts = [bindings.fill(part) for part in grammar.resolve(line, rng).split(">>")]
        return Exchange(tuple(Turn(("user", "assistant")[turn % 2], text) for turn, text in enumerate(texts)), topic)

    def _messages(self, system: str | None, exchanges: Sequence[Exchange], dimensions: Dimensions, key: str) -> tuple[Message, ...]:
        """The exchanges in order, with a word of transition where the topic changes, in the speakers' registers."""
        messages = [Message("system", grammar.tidy(system))] if system else []
        previous = exchanges[0].topic
        for place, exchange in enumerate(exchanges):
            for number, turn in enumerate(exchange.turns):
                rng = random.Random(f"{key}/{place}/{number}")  # per turn, so that a pair's shared turns come out the same
                text = turn.text
                if number == 0 and exchange.topic not in (previous, "thanks") and rng.random() < 0.5:
                    text = grammar.resolve(rng.choice(self.corpus.background.transitions), rng) + " " + text
                registers = USER_REGISTERS if turn.role == "user" else ASSISTANT_REGISTERS
                register = dimensions.user_register if turn.role == "user" else dimensions.assistant_register
                messages.append(Message(turn.role, registers[register](grammar.tidy(text), rng)))
            previous = exchange.topic
        return tuple(messages)

    def _both_by_user(self, dimensions: Dimensions) -> bool:
        acts = self.corpus.book.acts
        return all(name in acts and acts[name].speaker == "user" for name in (dimensions.violating_act, dimensions.allowed_act))


@dataclass(frozen=True)
class Frame:
    """What both conversations of a group share."""

    system: str | None
    exchanges: tuple[Exchange, ...]
    hard_negatives: tuple[str, ...]
    distractors: tuple[str, ...]


def _rounds(names: Sequence[str], length: int, rng: random.Random) -> list[str]:
    """`length` names, every name as often as every other, in random order."""
    rounds = [name for _ in range(length // len(names) + 1) for name in rng.sample(list(names), len(names))]
    return rounds[:length]


def _interleave(everyday: list[Exchange], chosen: list[Exchange], rng: random.Random) -> list[Exchange]:
    """`chosen` at random places among `everyday`, whose own order is kept."""
    merged = list(everyday)
    for exchange in chosen:
        merged.insert(rng.randint(0, len(merged)), exchange)
    return merged


def _stop(sentence: str) -> str:
    return sentence if sentence.rstrip().endswith((".", "?", "!")) else sentence + "."


_EXPAND = [
    (re.compile(pattern, re.IGNORECASE), full)
    for pattern, full in (
        (r"\bI'm\b", "I am"), (r"\bcan't\b", "cannot"), (r"\bwon't\b", "will not"), (r"n't\b", " not"), (r"'ve\b", " have"),
        (r"'ll\b", " will"), (r"'re\b", " are"), (r"\bI'd\b", "I would"), (r"\byou'd\b", "you would"),
        (r"\b(it|that|what|there|here|where|he|she)'s\b(?! (?:been|got|had))", r"\1 is"),
    )
]  # fmt: skip
_CONTRACT = [
    (re.compile(pattern), short)
    for pattern, short in (
        (r"\bI am(?= \w)", "I'm"), (r"\bcannot\b", "can't"), (r"\b(do|does|is|are|was|would|should|could) not\b", r"\1n't"),
        (r"\bwill not\b", "won't"), (r"\bI would\b", "I'd"), (r"\b(I|you|they|we) have (?=\w+ed\b)", r"\1've "),
    )
]  # fmt: skip
_CHAT = [
    (re.compile(pattern), short)
    for pattern, short in (
        (r"\bplease\b", "pls"), (r"\bthanks\b", "thx"), (r"\bbecause\b", "cuz"), (r"\bgoing to\b", "gonna"), (r"\bwant to\b", "wanna"),
        (r"\byou\b", "u"), (r"\byour\b", "ur"), (r"\btomorrow\b", "tmrw"), (r"'", ""), (r"\bI\b", "i"),
    )
]  # fmt: skip


def _formal(text: str, rng: random.Random) -> str:
    for pattern, full in _EXPAND:
        text = pattern.sub(full, text)
    return text[:1].upper() + text[1:]


def _relaxed(text: str, rng: random.Random) -> str:
    for pattern, short in _CONTRACT:
        text = pattern.sub(short, text)
    return text


def _casual(text: str, rng: random.Random) -> str:
    text = text[:1].lower() + text[1:]
    for pattern, short in _CHAT:
        if rng.random() < 0.5:
            text = pattern.sub(short, text)
    return text.rstrip(".")


def _typos(text: str, rng: random.Random) -> str:
    """About one word in twelve with two letters swapped or one dropped; numbers and addresses stay right."""

    def mistype(match: re.Match[str]) -> str:
        word = match[0]
        if rng.random() > 0.08:
            return word
        place = rng.randint(1, len(word) - 3)
        return word[:place] + (word[place + 1] + word[place] if rng.random() < 0.6 else word[place + 1]) + word[place + 2 :]

    return re.sub(r"(?<![\w@.])[a-z]{5,}(?![\w@])", mistype, text)


def _unchanged(text: str, rng: random.Random) -> str:
    return text


Register = Callable[[str, random.Random], str]
USER_REGISTERS: dict[str, Register] = {"neutral": _unchanged, "formal": _formal, "casual": _casual, "terse": _relaxed, "typos": _typos}
ASSISTANT_REGISTERS: dict[str, Register] = {"neutral": _unchanged, "formal": _formal, "relaxed": _relaxed}
