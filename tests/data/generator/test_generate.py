import itertools
import random
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
from sklearn.metrics import roc_auc_score

from data.generator import grammar
from data.generator.dimensions import SHORTEST, UNRELATED
from data.generator.exchange import count_tokens
from data.generator.generate import REWRITES, Counts, GroupPlan, generate
from data.generator.library import load_corpus, load_phrasebook
from data.generator.phrasebook import Corpus, line_id, pool_of
from data.splits import refuse_leaks, text_of
from guard.conversation.example import Example
from guard.errors import GuardError
from guard.prompt.decoder import PromptBuilder
from guard.recipe import load_recipe
from guard.rule import load_rule
from tests.data.generator.corpora import RULES_WITH_PHRASES, corpus_of

pytestmark = pytest.mark.slow

COUNTS = Counts(train=160, validation=16, test=80)


@pytest.fixture(scope="module")
def corpora() -> dict[str, Corpus]:
    return {name: corpus_of(name) for name in RULES_WITH_PHRASES}


@pytest.fixture(scope="module")
def written(corpora: dict[str, Corpus]) -> dict[str, list[Example]]:
    return {name: generate(corpus, COUNTS, seed=0) for name, corpus in corpora.items()}


@pytest.fixture(params=RULES_WITH_PHRASES)
def rule_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_corpora_here_are_those_that_are_loaded_from_disk() -> None:
    rules = [load_rule(name) for name in RULES_WITH_PHRASES]
    assert load_corpus(rules[0], rules) == corpus_of(rules[0].id)


def test_the_same_seed_writes_the_same_text_and_another_seed_another(
    corpora: dict[str, Corpus],
) -> None:
    small = Counts(train=8, validation=4, test=8)
    first, again, second = (generate(corpora["medical_advice"], small, seed) for seed in (3, 3, 4))
    assert first == again
    assert not {text_of(example) for example in first} & {text_of(example) for example in second}


def test_counts_strata_and_labels_are_as_asked(
    written: dict[str, list[Example]], rule_name: str
) -> None:
    rows = Counter((e.split, e.meta["stratum"], e.label) for e in written[rule_name])
    assert rows == {
        **{("train", "seen", label): 80 for label in (0, 1)},
        **{("validation", stratum, label): 4 for stratum in ("seen", "unseen") for label in (0, 1)},
        **{("test", stratum, label): 20 for stratum in ("seen", "unseen") for label in (0, 1)},
    }


def test_the_label_follows_from_the_target_act_alone(
    corpora: dict[str, Corpus], written: dict[str, list[Example]], rule_name: str
) -> None:
    corpus = corpora[rule_name]
    for example in written[rule_name]:
        act = corpus.book.acts.get(example.meta["act"])
        judged = act is not None and corpus.rule.judged in (act.speaker, "conversation")
        assert example.label == (act is not None and judged and act.stance == "does")
        assert (act is None) == (example.meta["act"] == UNRELATED)
        assert not any(
            corpus.book.acts[name].violates(corpus.rule.judged)
            for name in example.meta["hard_negative_acts"]
        )


def test_every_message_names_its_act(
    corpora: dict[str, Corpus], written: dict[str, list[Example]], rule_name: str
) -> None:
    books = {book.rule: book for book in (corpora[rule_name].book, *corpora[rule_name].borrowed)}
    for example in written[rule_name]:
        performed = [
            (message.role, act)
            for message, act in zip(example.messages, example.meta["acts"], strict=True)
            if act
        ]
        assert len(performed) in (len(example.meta["cores"]), len(example.meta["cores"]) - 1), (
            "the last answer may be left out"
        )
        for (role, act), core in zip(performed, example.meta["cores"], strict=False):
            book, name = act.split("/")
            assert books[book].acts[name].speaker == role
            assert core.startswith(act + "/")
        if example.meta["act"] != UNRELATED:
            assert f"{rule_name}/{example.meta['act']}" in example.meta["acts"]


def test_a_pair_differs_in_the_judged_speakers_turn_only(
    corpora: dict[str, Corpus], written: dict[str, list[Example]], rule_name: str
) -> None:
    judged, acts = corpora[rule_name].rule.judged, corpora[rule_name].book.acts
    contrasts = 0
    for violating, allowed in _pairs(written[rule_name]):
        assert (violating.label, allowed.label) == (1, 0)
        assert violating.split == allowed.split
        if allowed.meta["act"] != UNRELATED:
            different = [
                first.role
                for first, second in zip(violating.messages, allowed.messages, strict=True)
                if first != second
            ]
            assert different == [
                acts[violating.meta["act"]].speaker if judged == "conversation" else judged
            ]
            contrasts += 1
    assert contrasts > 0.8 * len(written[rule_name]) / 2


def test_an_answer_misses_its_question_as_rarely_in_violating_rows_as_in_others(
    corpora: dict[str, Corpus], written: dict[str, list[Example]], rule_name: str
) -> None:
    """What the other speaker says is allowed around the row's act, whatever its label."""
    acts = corpora[rule_name].book.acts
    for label in (0, 1):
        rows = [
            e for e in written[rule_name] if e.label == label and e.meta["allowed_act"] != UNRELATED
        ]
        questions = {e.id: acts[e.meta["act"]].context for e in rows}
        # A violating act may also take a turn before an allowed one that it names; what else stands
        # before that is the allowed one's.
        assert [
            e.id
            for e in rows
            if e.meta["context"] not in questions[e.id]
            and e.meta["allowed_act"] not in questions[e.id]
        ] == []
        assert len({e.meta["context"] for e in rows}) > 2


def test_every_kind_of_question_is_followed_by_violations_and_by_others(
    written: dict[str, list[Example]], rule_name: str
) -> None:
    """In a pair both acts stand in the same context, unless one is the other's context."""
    for violating, allowed in _pairs(written[rule_name]):
        if allowed.meta["act"] != UNRELATED:
            assert violating.meta["context"] in (allowed.meta["context"], allowed.meta["act"])


def test_no_conversation_says_the_same_thing_twice(
    written: dict[str, list[Example]], rule_name: str
) -> None:
    if rule_name == "repetition":
        pytest.skip("saying the same thing twice is what it is about")
    for example in written[rule_name]:
        texts = Counter(
            (m.role, m.content.lower()) for m in example.messages if len(m.content.split()) > 4
        )
        assert [text for text, times in texts.items() if times > 1] == [], example.id
        questions = Counter(m.content.lower() for m in example.messages if m.role == "user")
        assert max(questions.values()) == 1, example.id


def test_no_group_and_no_near_duplicate_straddles_splits(
    written: dict[str, list[Example]], rule_name: str
) -> None:
    refuse_leaks(written[rule_name])


def test_held_out_cores_are_absent_from_training_by_name(
    written: dict[str, list[Example]], rule_name: str
) -> None:
    rows = written[rule_name]
    seen = _cores(e for e in rows if e.meta["stratum"] == "seen")
    held = _cores(e for e in rows if e.meta["stratum"] == "unseen")
    of_test = _cores(e for e in rows if (e.split, e.meta["stratum"]) == ("test", "unseen"))
    assert held - of_test
    assert not held & seen
    assert not of_test & _cores(e for e in rows if e.split == "validation") - seen


def test_held_out_cores_are_absent_from_training_by_text(
    corpora: dict[str, Corpus], written: dict[str, list[Example]], rule_name: str
) -> None:
    rows = [example for example in written[rule_name] if example.meta["stratum"] == "seen"]
    seen_text = " ".join(_plain(text_of(example)) for example in rows)
    phrases: set[str] = set()
    for act in corpora[rule_name].book.acts.values():
        for core in pool_of(act.cores, "unseen"):
            phrases.update(_fixed_words(core))
    shared = _plain(" / ".join(_lines_in_training(corpora[rule_name])))
    phrases = {phrase for phrase in phrases if f" {phrase} " not in shared}
    assert len(phrases) > 15
    assert not [phrase for phrase in phrases if f" {phrase} " in seen_text]


def _cores(examples: Iterable[Example]) -> set[str]:
    """The names of the cores that the examples were written from."""
    names: set[str] = set()
    for example in examples:
        names.update(example.meta["cores"])
    return names


def _lines_in_training(corpus: Corpus) -> list[str]:
    """What training conversations may say anyway: all but the cores that are held out."""
    lines: list[str] = []
    for pool in corpus.background.domains.values():
        lines += pool
    for book in (corpus.book, *corpus.borrowed):
        for pool in (*book.lines.values(), *book.slots.values()):
            lines += pool
        for act in book.acts.values():
            lines += pool_of(act.cores, "seen")
            if book is not corpus.book:
                lines += act.cores
    return lines


def test_every_phrasing_in_the_data_is_named_after_its_core(
    corpora: dict[str, Corpus], written: dict[str, list[Example]]
) -> None:
    acts = corpora["pii_leak"].book.acts
    ids = {f"pii_leak/{name}/{line_id(core)}" for name, act in acts.items() for core in act.cores}
    named = {
        core
        for e in written["pii_leak"]
        for core in e.meta["cores"]
        if core.startswith("pii_leak/")
    }
    assert named <= ids
    assert all(len(e.meta["cores"]) == len(e.meta["phrasings"]) for e in written["pii_leak"])


def test_length_and_turns_say_nothing_about_the_label(written: dict[str, list[Example]]) -> None:
    examples = [example for rows in written.values() for example in rows]
    labels = [example.label for example in examples]
    assert abs(roc_auc_score(labels, [len(text_of(e)) for e in examples]) - 0.5) < 0.03
    assert abs(roc_auc_score(labels, [len(e.messages) for e in examples]) - 0.5) < 0.01


def test_within_a_pair_either_conversation_is_the_longer_one(
    written: dict[str, list[Example]],
) -> None:
    differences = []
    for rows in written.values():
        for violating, allowed in zip(rows[::2], rows[1::2], strict=True):
            assert (violating.label, allowed.label) == (1, 0)
            first, second = (
                sum(count_tokens(message.content) for message in example.messages)
                for example in (violating, allowed)
            )
            differences.append(first - second)
    assert 0.4 < sum(d > 0 for d in differences) / sum(d != 0 for d in differences) < 0.6
    assert sum(abs(d) for d in differences) / len(differences) < 8


def test_every_dimension_is_independent_of_the_label(
    written: dict[str, list[Example]], rule_name: str
) -> None:
    for name in (
        "domain",
        "severity",
        "position",
        "user_register",
        "assistant_register",
        "has_system",
        "hard_negatives",
        "target_tokens",
        "trick",
    ):
        by_label = [
            Counter(e.meta[name] for e in written[rule_name] if e.label == label)
            for label in (0, 1)
        ]
        assert by_label[0] == by_label[1], name
        assert len(by_label[0]) > 1, name


def test_the_token_estimate_is_close_to_the_tiny_base(
    written: dict[str, list[Example]], rule_name: str
) -> None:
    builder = PromptBuilder.from_base(load_recipe("tiny").base_path)
    turns = [message for example in written[rule_name][:80] for message in example.messages]
    estimated = sum(count_tokens(message.content) for message in turns)
    assert abs(estimated / sum(len(builder.turn_ids(message)) for message in turns) - 1) < 0.08


def test_conversations_are_about_as_long_as_planned(
    written: dict[str, list[Example]], rule_name: str
) -> None:
    lengths = [
        sum(count_tokens(message.content) for message in example.messages)
        for example in written[rule_name]
    ]
    ratios = sorted(
        length / example.meta["target_tokens"]
        for length, example in zip(lengths, written[rule_name], strict=True)
    )
    assert 0.85 < ratios[len(ratios) // 2] < 1.15
    assert ratios[len(ratios) // 10] > 0.7
    assert sum(length < SHORTEST for length in lengths) <= 0.01 * len(lengths)


def test_speakers_take_turns(written: dict[str, list[Example]], rule_name: str) -> None:
    for example in written[rule_name]:
        roles = [message.role for message in example.messages if message.role != "system"]
        assert roles[0] == "user"
        assert all(first != second for first, second in itertools.pairwise(roles))
        assert ("tool", "user") not in itertools.pairwise(roles)


def test_other_rules_acts_appear_as_distractors_in_both_labels_where_the_book_lets_them(
    corpora: dict[str, Corpus], written: dict[str, list[Example]], rule_name: str
) -> None:
    lent = (
        {book.rule for book in corpora[rule_name].borrowed}
        if not corpora[rule_name].rule.depends_on_context
        else set()
    )
    assert rule_name not in lent
    for label in (0, 1):
        named = {
            name.split("/")[0]
            for e in written[rule_name]
            if e.label == label
            for name in e.meta["distractor_acts"]
        }
        assert named <= lent
        assert len(named) >= 0.7 * len(lent)


def test_asking_for_more_than_the_phrases_give_is_an_error(corpora: dict[str, Corpus]) -> None:
    corpus = corpora["medical_advice"]
    poor = corpus.book.model_copy(
        update={
            "slots": {name: values[:1] for name, values in corpus.book.slots.items()},
            "acts": {
                n: a.model_copy(update={"cores": ("yes", "so it is", "indeed", "confident")})
                for n, a in corpus.book.acts.items()
            },
            "lines": dict.fromkeys(corpus.book.lines, ("what now", "and now")),
            "parts": dict.fromkeys(corpus.book.parts, ("ok",))
            | {"padding": ("a", "b", "c"), "padding_user": ("a", "b", "c")},
        }
    )
    background = corpus.background.model_copy(
        update={
            "domains": dict.fromkeys(corpus.background.domains, ("hi >> hello",)),
            "transitions": ("ok",),
            "thanks": ("hi >> hello",),
            "systems": ("be kind",),
        }
    )
    with pytest.raises(GuardError, match="still near duplicates"):
        generate(Corpus(corpus.rule, poor, (), background), Counts(40, 4, 8), seed=0)


def test_the_last_rewrite_counts(
    corpora: dict[str, Corpus], monkeypatch: pytest.MonkeyPatch
) -> None:
    first: list[Example] = []
    write = GroupPlan.write

    def late(plan: GroupPlan, attempt: int) -> list[Example]:
        """The second group copies the first one until its last attempt."""
        if not plan.key.endswith("train/seen/1") or attempt == REWRITES:
            examples = write(plan, attempt)
            first.extend(examples if not first else ())
            return examples
        return [replace(example, group=plan.key) for example in first]

    plain = generate(corpora["medical_advice"], Counts(8, 4, 8), seed=0)
    monkeypatch.setattr(GroupPlan, "write", late)
    examples = generate(corpora["medical_advice"], Counts(8, 4, 8), seed=0)
    assert [e.id for e in examples if e.id.endswith(f"~{REWRITES}/1")] == [examples[2].id]
    assert [e for e in examples if "~" not in e.id] == plain[:2] + plain[4:]


def test_a_book_that_does_not_lend_its_acts_is_no_distractor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rules = [load_rule(name) for name in ("medical_advice", "pii_leak")]

    def selfish(rule, background):  # type: ignore[no-untyped-def]
        return load_phrasebook(rule, background).model_copy(
            update={"borrows": rule.id != "pii_leak"}
        )

    monkeypatch.setattr("data.generator.library.load_phrasebook", selfish)
    assert load_corpus(rules[0], rules).borrowed == ()


def _pairs(rows: list[Example]) -> list[tuple[Example, Example]]:
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    assert all(first.group == second.group for first, second in pairs)
    return pairs


def _plain(text: str) -> str:
    return " " + " ".join(re.findall(r"[a-z0-9']+", text.lower())) + " "


def _fixed_words(core: str) -> list[str]:
    """The parts of a core that stand in every form of it and are long enough to recognise it by."""
    flat = core
    while "(" in flat:
        flat = re.sub(r"\([^()]*\)", "{}", flat)
    parts = [
        " ".join(re.findall(r"[a-z0-9']+", part))
        for part in re.split(r"\{[^}]*\}|[.,:;?!\"]", flat)
    ]
    return [part for part in parts if len(part.split()) >= 5]


def test_fixed_words_are_what_the_grammar_keeps() -> None:
    assert _fixed_words("(so|well) this is how it goes, {drug} my dear") == ["this is how it goes"]
    assert "this is how it goes" in grammar.resolve(
        "(so|well) this is how it goes", random.Random(0)
    )
