import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
from sklearn.metrics import roc_auc_score

from data.generator.dimensions import SHORTEST, UNRELATED, Dimensions
from data.generator.exchange import count_tokens
from data.generator.generate import REWRITES, Counts, generate
from data.generator.library import load_excerpts
from data.generator.phrasebook import Corpus, line_id
from data.generator.writer import Writer
from data.splits import refuse_leaks, text_of
from guard.conversation.example import Example, Split
from guard.errors import GuardError
from guard.prompt.decoder import PromptBuilder
from guard.prompt.windows import counting
from guard.recipe import load_recipe
from tests.data.generator.corpora import RULES_WITH_PHRASES, corpus_of

pytestmark = pytest.mark.slow

COUNTS = Counts(train=160, validation=16, test=80)
FEW = Counts(train=8, validation=4, test=8)
INDEPENDENT = (
    *("domain", "severity", "position", "user_register", "assistant_register", "has_system"),
    *("hard_negatives", "target_tokens", "trick"),
)


@pytest.fixture(scope="module")
def written() -> dict[str, list[Example]]:
    return {name: generate(corpus_of(name), COUNTS, seed=0) for name in RULES_WITH_PHRASES}


@pytest.fixture(scope="module", params=RULES_WITH_PHRASES)
def corpus(request: pytest.FixtureRequest) -> Corpus:
    return corpus_of(request.param)


@pytest.fixture
def rows(corpus: Corpus, written: dict[str, list[Example]]) -> list[Example]:
    return written[corpus.rule.id]


def test_the_same_seed_writes_the_same_text_and_another_seed_another() -> None:
    corpus = corpus_of("medical_advice")
    excerpts = load_excerpts(corpus.rule)
    first, again, second = (generate(corpus, FEW, seed, excerpts) for seed in (3, 3, 4))
    assert first == again and any("excerpt" in example.meta for example in first)
    assert not {text_of(example) for example in first} & {text_of(example) for example in second}


def test_counts_and_strata_are_as_asked_and_dimensions_independent_of_the_label(
    rows: list[Example],
) -> None:
    counted = Counter((e.split, e.meta["stratum"], e.label) for e in rows)
    asked = {("train", "seen"): 80}
    for stratum in ("seen", "unseen"):
        asked |= {("validation", stratum): 4, ("test", stratum): 20}
    assert counted == {(*part, label): count for part, count in asked.items() for label in (0, 1)}
    for name in INDEPENDENT:
        violating, allowed = (
            Counter(e.meta[name] for e in rows if e.label == label) for label in (1, 0)
        )
        assert violating == allowed, name
        assert len(violating) > 1, name


def test_the_label_follows_from_the_target_act_and_every_message_names_its_act(
    corpus: Corpus, rows: list[Example]
) -> None:
    acts, judged = corpus.book.acts, corpus.rule.judged
    books = {book.rule: book for book in (corpus.book, *corpus.borrowed)}
    for example in rows:
        act = acts.get(example.meta["act"])
        does = act is not None and act.stance == "does"
        assert example.label == (does and judged in (act.speaker, "conversation"))
        is_near = act is not None and act.stance not in ("declines", "informs")
        assert example.is_twin == (is_near and not example.label)  # no other talk is one
        assert not any(acts[name].violates(judged) for name in example.meta["hard_negative_acts"])
        cores = example.meta["cores"]
        turns = zip(example.messages, example.meta["acts"], strict=True)
        performed = [(message.role, named) for message, named in turns if named]
        # The last answer may be left out.
        assert len(performed) in (len(cores), len(cores) - 1)
        assert len(cores) == len(example.meta["phrasings"])
        for (role, named), core in zip(performed, cores, strict=False):
            rule, name = named.split("/")
            assert books[rule].acts[name].speaker == role
            assert core in {f"{named}/{line_id(core)}" for core in books[rule].acts[name].cores}
        if example.meta["act"] == UNRELATED:
            assert not example.label
        else:
            assert f"{corpus.rule.id}/{example.meta['act']}" in example.meta["acts"]


def test_a_pair_differs_in_one_turn_of_the_judged(corpus: Corpus, rows: list[Example]) -> None:
    contrasts = 0
    for violating, allowed in _pairs(rows):
        assert (violating.label, allowed.label) == (1, 0)
        assert violating.split == allowed.split
        if allowed.meta["act"] != UNRELATED:
            turns = zip(violating.messages, allowed.messages, strict=True)
            # Of a rule on any speaker it is who performs the violating act.
            speaker = corpus.book.acts[violating.meta["act"]].speaker
            assert corpus.rule.judged in (speaker, "conversation")
            assert [first.role for first, second in turns if first != second] == [speaker]
            # Both acts stand in the same context, unless one is the other's context.
            contexts = (allowed.meta["context"], allowed.meta["act"])
            assert violating.meta["context"] in contexts
            contrasts += 1
    assert contrasts > 0.8 * len(rows) / 2


def test_no_answer_misses_its_question_whatever_the_label(
    corpus: Corpus, rows: list[Example]
) -> None:
    """What the other speaker says is allowed around the row's act, whatever its label."""
    for label in (0, 1):
        contexts = set()
        for example in rows:
            if example.label == label and example.meta["allowed_act"] != UNRELATED:
                questions = corpus.book.acts[example.meta["act"]].context
                # A violating act may also take a turn before an allowed one that it names; what
                # else stands before that is the allowed one's.
                named = {example.meta["context"], example.meta["allowed_act"]}
                assert named & set(questions), example.id
                contexts.add(example.meta["context"])
        assert len(contexts) > 2


def test_speakers_take_turns_and_say_nothing_twice(corpus: Corpus, rows: list[Example]) -> None:
    for example in rows:
        roles = [message.role for message in example.messages if message.role != "system"]
        assert roles[0] == "user"
        assert all(first != second for first, second in itertools.pairwise(roles))
        assert ("tool", "user") not in itertools.pairwise(roles)
        said = []
        for message in example.messages:
            if message.role == "user" or len(message.content.split()) > 4:
                said.append((message.role, message.content.lower()))
        # To say the same thing twice is what `repetition` is about.
        assert len(set(said)) == len(said) or corpus.rule.id == "repetition", example.id


def test_held_out_cores_are_absent_from_training_by_name_without_leaks(rows: list[Example]) -> None:
    refuse_leaks(rows)
    seen = _cores(e for e in rows if e.meta["stratum"] == "seen")
    held = _cores(e for e in rows if e.meta["stratum"] == "unseen")
    of_test = _cores(e for e in rows if (e.split, e.meta["stratum"]) == ("test", "unseen"))
    assert held - of_test
    assert not held & seen
    assert not of_test & _cores(e for e in rows if e.split == "validation") - seen


def _cores(examples: Iterable[Example]) -> set[str]:
    """The names of the cores that the examples were written from."""
    return set(itertools.chain.from_iterable(example.meta["cores"] for example in examples))


def test_length_and_turns_say_nothing_about_the_label(written: dict[str, list[Example]]) -> None:
    examples = [example for rows in written.values() for example in rows]
    labels = [example.label for example in examples]
    assert abs(roc_auc_score(labels, [len(text_of(e)) for e in examples]) - 0.5) < 0.03
    assert abs(roc_auc_score(labels, [len(e.messages) for e in examples]) - 0.5) < 0.01
    # Within a pair either conversation is the longer one.
    differences = [_tokens(first) - _tokens(second) for first, second in _pairs(examples)]
    assert 0.4 < sum(d > 0 for d in differences) / sum(d != 0 for d in differences) < 0.6
    assert sum(abs(d) for d in differences) / len(differences) < 8


def test_conversations_are_about_as_long_as_planned_in_tokens_of_the_tiny_base(
    rows: list[Example],
) -> None:
    ratios = sorted(_tokens(example) / example.meta["target_tokens"] for example in rows)
    assert 0.85 < ratios[len(ratios) // 2] < 1.15
    assert ratios[len(ratios) // 10] > 0.7
    assert sum(_tokens(example) < SHORTEST for example in rows) <= 0.01 * len(rows)
    builder = PromptBuilder.from_base(load_recipe("tiny").base_path)
    turns = list(itertools.chain.from_iterable(example.messages for example in rows[:80]))
    counted = sum(len(builder.turn_ids(message)) for message in turns)
    estimated = sum(count_tokens(message.content) for message in turns)
    assert abs(estimated / counted - 1) < 0.08


def test_other_rules_acts_are_distractors_in_both_labels(
    corpus: Corpus, rows: list[Example]
) -> None:
    lent: set[str] = set()
    if not corpus.rule.depends_on_context:
        lent = {book.rule for book in corpus.borrowed}
    assert corpus.rule.id not in lent
    for label in (0, 1):
        acts = [e.meta["distractor_acts"] for e in rows if e.label == label]
        named = {name.split("/")[0] for name in itertools.chain.from_iterable(acts)}
        assert named <= lent
        assert len(named) >= 0.7 * len(lent)


@pytest.mark.parametrize("rewritten", [True, False])
def test_the_last_rewrite_counts_and_too_few_phrases_are_an_error(
    rewritten: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second group copies the first one until its last attempt, or still then."""
    plain, group = generate(corpus_of("medical_advice"), FEW, seed=0), Writer.group

    def late(writer: Writer, dimensions: Dimensions, split: Split, key: str) -> list[Example]:
        if "train/seen/1" not in key or (rewritten and key.endswith(f"~{REWRITES}")):
            return group(writer, dimensions, split, key)
        return [replace(example, group=key) for example in plain[:2]]

    monkeypatch.setattr(Writer, "group", late)
    if not rewritten:
        with pytest.raises(GuardError, match="still near duplicates"):
            generate(corpus_of("medical_advice"), FEW, seed=0)
        return
    examples = generate(corpus_of("medical_advice"), FEW, seed=0)
    assert [e.id for e in examples if e.id.endswith(f"~{REWRITES}/1")] == [examples[2].id]
    assert [e for e in examples if "~" not in e.id] == plain[:2] + plain[4:]


@pytest.fixture(scope="module")
def rows_on_last_turn(corpus: Corpus) -> list[Example]:
    rule = corpus.rule.model_copy(update={"turns": "last"})
    counts = Counts(train=200, validation=16, test=40)
    return generate(replace(corpus, rule=rule), counts, 0, load_excerpts(rule))


def test_a_pair_differs_in_the_last_judged_turn(
    corpus: Corpus, rows_on_last_turn: list[Example]
) -> None:
    reads = corpus.rule.model_copy(update={"turns": "last"}).reads
    violating_acts = {f"{corpus.rule.id}/{act}" for act in corpus.acts(violating=True)}
    earlier = {0: 0, 1: 0}
    for pair in _pairs(rows_on_last_turn):
        assert [row.label for row in pair] == [1, 0]
        turns = enumerate(zip(*(row.messages for row in pair), strict=True))
        differing = [number for number, (first, second) in turns if first != second]
        for row in pair:
            (last,) = counting([message.role for message in row.messages], reads)
            assert differing == [last]
            acts = row.meta["acts"]
            assert len(acts) == len(row.messages)
            assert acts[last] == f"{corpus.rule.id}/{row.meta['act']}"
            if "excerpt" in row.meta:
                violates = row.meta["act"] == row.meta["violating_act"]
            else:
                violates = acts[last] in violating_acts
                assert last == len(row.messages) - 1
                assert len(row.meta["cores"]) == sum(act is not None for act in acts)
            assert violates == (row.label == 1)
            earlier[row.label] += bool(violating_acts & set(acts[:-1]))
    # What violates may stand before the last turn in both rows.
    assert earlier[0] == earlier[1] > 0


def test_length_says_little_about_the_last_turn(rows_on_last_turn: list[Example]) -> None:
    labels = [row.label for row in rows_on_last_turn]
    whole = roc_auc_score(labels, [len(text_of(row)) for row in rows_on_last_turn])
    assert abs(whole - 0.5) < 0.08
    # Of the turn itself as little as in rows on any turn, where the rule's phrases decide.
    last = roc_auc_score(labels, [len(row.messages[-1].content) for row in rows_on_last_turn])
    assert abs(last - 0.5) < 0.2


def _pairs(rows: list[Example]) -> list[tuple[Example, Example]]:
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    assert all(first.group == second.group for first, second in pairs)
    return pairs


def _tokens(example: Example) -> int:
    return sum(count_tokens(message.content) for message in example.messages)
