"""Logic over verdicts: what is unjudged never becomes an allow, and what decided is said. And the
file of rule sets: every mistake in it is named before a server starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guard.errors import GuardError
from serve.policy.logic import MAX_DEPTH, MAX_METADATA, Decision, Facts, parse
from serve.policy.rule_set import RuleSet, load_rule_sets
from serve.policy.ruling import Ruling, all_of, any_of

ALLOW, UNJUDGED, VIOLATION = Ruling.ALLOW, Ruling.UNJUDGED, Ruling.VIOLATION
RULES = ("a", "b", "c", "d")
CHANNELS = ("email", "chat")
ONE_KIND = "needs exactly one of rule, any_of, all_of, metadata"


def combinations(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Every kind of combination, of these expressions."""
    lists = st.lists(children, min_size=1, max_size=3)
    return st.one_of(
        st.builds(lambda parts: {"any_of": parts}, lists),
        st.builds(lambda parts: {"all_of": parts}, lists),
        st.builds(lambda rule, other: {"rule": rule, "unless": other}, children, children),
        st.builds(lambda parts, other: {"any_of": parts, "unless": other}, lists, children),
    )


LEAVES = st.one_of(
    st.sampled_from(RULES),
    st.sampled_from(CHANNELS).map(lambda channel: {"metadata": {"channel": channel}}),
)
EXPRESSIONS = st.recursive(LEAVES, combinations, max_leaves=8)
RULINGS = st.fixed_dictionaries({rule: st.sampled_from(Ruling) for rule in RULES})
METADATA = st.sampled_from([{}, *({"channel": channel} for channel in CHANNELS)])


def evaluate(
    content: Any, rulings: Mapping[str, Ruling], metadata: Mapping[str, str] | None = None
) -> Decision:
    return parse(content, "test").evaluate(Facts(rulings, metadata or {}))


def completions(
    rulings: Mapping[str, Ruling], metadata: Mapping[str, str]
) -> Iterator[tuple[dict[str, Ruling], dict[str, str]]]:
    """Every way in which what is unjudged, and not stated, could turn out."""
    options = [(ALLOW, VIOLATION) if one is UNJUDGED else (one,) for one in rulings.values()]
    stated = [metadata["channel"]] if metadata else [*CHANNELS, "neither"]
    for values, channel in product(product(*options), stated):
        yield dict(zip(rulings, values, strict=True)), {"channel": channel}


@given(st.lists(st.sampled_from(Ruling), min_size=1, max_size=5))
def test_a_result_of_several_rulings_is_known_if_no_missing_one_changes_it(
    rulings: list[Ruling],
) -> None:
    """Kleene's strong logic."""
    named = {str(number): ruling for number, ruling in enumerate(rulings)}
    for combine in (any_of, all_of):
        possible = {combine(known.values()) for known, _ in completions(named, {"channel": "chat"})}
        expected = possible.pop() if len(possible) == 1 else UNJUDGED
        assert combine(rulings) is expected
        with pytest.raises(ValueError, match="empty"):
            combine([])


@given(EXPRESSIONS, RULINGS, METADATA)
def test_an_allow_and_a_violation_stay_whatever_the_missing_verdicts_say(
    content: Any, rulings: dict[str, Ruling], metadata: dict[str, str]
) -> None:
    result = evaluate(content, rulings, metadata).ruling
    if result is not UNJUDGED:
        for completed, stated in completions(rulings, metadata):
            assert evaluate(content, completed, stated).ruling is result


@given(EXPRESSIONS, RULINGS, METADATA)
def test_what_is_fully_judged_has_a_verdict_and_what_nobody_judged_has_none(
    content: Any, rulings: dict[str, Ruling], metadata: dict[str, str]
) -> None:
    for completed, stated in completions(rulings, metadata):
        assert evaluate(content, completed, stated).ruling is not UNJUDGED
    for nothing in ({}, dict.fromkeys(RULES, UNJUDGED)):
        assert evaluate(content, nothing).ruling is UNJUDGED


@given(EXPRESSIONS, RULINGS, METADATA, RULINGS)
def test_what_did_not_decide_changes_no_verdict(
    content: Any, rulings: dict[str, Ruling], metadata: dict[str, str], others: dict[str, Ruling]
) -> None:
    decision = evaluate(content, rulings, metadata)
    assert decision.decided_by
    kept = {rule: one for rule, one in rulings.items() if rule in decision.decided_by}
    if decision.ruling is not UNJUDGED:
        assert evaluate(content, others | kept, metadata).ruling is decision.ruling


def test_unless_lets_pass_what_its_exception_is_known_to_hold_for() -> None:
    content: Any = {"rule": "a", "unless": "b"}
    for exception, expected in ((VIOLATION, ALLOW), (ALLOW, VIOLATION), (UNJUDGED, UNJUDGED)):
        assert evaluate(content, {"a": VIOLATION, "b": exception}).ruling is expected
    assert evaluate(content, {"a": ALLOW, "b": UNJUDGED}) == (ALLOW, ("a",))
    # Metadata: any of a key's values, and all keys.
    content = {"rule": "a", "unless": {"metadata": {"region": ["eu", "uk"], "tier": "staff"}}}
    violated = {"a": VIOLATION}
    staff = {"tier": "staff"}
    assert evaluate(content, violated, {"region": "uk", **staff}).ruling is ALLOW
    assert evaluate(content, violated, {"region": "us", **staff}).ruling is VIOLATION
    assert evaluate(content, violated, staff) == (UNJUDGED, ("metadata.region",))


def test_what_decided_is_only_what_the_verdict_rests_on() -> None:
    content = {"any_of": ["a", {"all_of": ["b", "c"]}]}
    cases = [
        ({"a": VIOLATION, "b": VIOLATION, "c": ALLOW}, (VIOLATION, ("a",))),
        ({"a": ALLOW, "b": VIOLATION, "c": VIOLATION}, (VIOLATION, ("b", "c"))),
        ({"a": ALLOW, "b": VIOLATION, "c": ALLOW}, (ALLOW, ("a", "c"))),
        ({"a": ALLOW, "b": UNJUDGED, "c": VIOLATION}, (UNJUDGED, ("b",))),
        ({"a": UNJUDGED, "b": UNJUDGED, "c": ALLOW}, (UNJUDGED, ("a",))),
    ]
    for rulings, decision in cases:
        assert evaluate(content, rulings) == decision


def nested(depth: int) -> Any:
    content: Any = "a"
    for _ in range(depth):
        content = {"any_of": [content]}
    return content


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (nested(MAX_DEPTH + 1), "nested more than"),
        ({}, rf"test: {ONE_KIND} \(got nothing\)"),
        ({"anyof": ["a"]}, r"test: unknown key \(got anyof\)\. Did you mean 'any_of'\?"),
        ({"any_of": ["a"], "all_of": ["b"]}, rf"{ONE_KIND} \(got any_of, all_of\)"),
        ({"any_of": []}, r"test\.any_of: not a list \(got \[\]\)"),
        ({"all_of": ["a", {"any_of": [None]}]}, r"test\.all_of\.1\.any_of\.0: neither"),
        ({"metadata": {}}, r"test\.metadata: not a mapping"),
        ({"metadata": {"tier": 1}}, r"test\.metadata\.tier: not a text \(got 1\).*quotes"),
        ({"metadata": {"tier": []}}, r"test\.metadata\.tier: no value"),
        ({"metadata": {"tier": ["a", "v" * 201]}}, r"metadata\.tier: longer than the 200"),
    ],
)
def test_what_is_no_expression_is_told_where_and_how_to_write_it(content: Any, error: str) -> None:
    with pytest.raises(GuardError, match=error) as raised:
        parse(content, "test")
    assert raised.value.remedy
    assert evaluate(nested(MAX_DEPTH), {"a": VIOLATION}).ruling is VIOLATION


SERVED = ("medical_advice", "pii_leak", "refund_promise")
FILE = """
rule_sets:
  everything: {rules: [medical_advice, pii_leak]}
  support:
    description: what the shop's assistant must not say
    rules: [pii_leak, refund_promise]
    violated_if:
      any_of:
        - {rule: pii_leak, unless: {metadata: {audience: internal}}}
        - refund_promise
"""


def load_sets(folder: Path, text: str) -> dict[str, RuleSet]:
    path = folder / "sets.yaml"
    path.write_text(text)
    return load_rule_sets(path, SERVED)


def test_a_set_is_violated_by_any_rule_or_by_its_logic(tmp_path: Path) -> None:
    rule_sets = load_sets(tmp_path, FILE)
    everything, support = rule_sets["everything"], rule_sets["support"]
    assert (everything.name, everything.rules) == ("everything", ("medical_advice", "pii_leak"))
    rulings = dict.fromkeys(SERVED, Ruling.ALLOW) | {"pii_leak": Ruling.VIOLATION}
    assert everything.decide(rulings, {}) == (Ruling.VIOLATION, ("pii_leak",))
    assert support.decide(rulings, {"audience": "internal"}).ruling is Ruling.ALLOW
    assert support.decide(rulings, {"audience": "customers"}).ruling is Ruling.VIOLATION
    assert support.decide(rulings, {}).ruling is Ruling.UNJUDGED
    assert RuleSet.any_of(["a", "b", "a"]).rules == ("a", "b")


def one(rules: str, logic: str = "") -> str:
    return f"rule_sets: {{a: {{rules: [{rules}]{logic and f', violated_if: {logic}'}}}}}"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("rule_sets: {A: {rules: [pii_leak]}}", r"rule_sets\.A"),
        (one(""), r"'rule_sets\.a\.rules'.*at least 1"),
        ("rule_sets: {a: {rules: [pii_leak], unseen_language: allow}}", "unseen_language"),
        ("rule_sets: {a: {rules: [pii_leak], if: x}}", r"unknown key 'rule_sets\.a\.if'"),
        (one("pi_leak"), r"a\.rules: the rule is not served \(got pi_leak\)\. Did you mean 'pii"),
        (one("pii_leak, pii_leak"), r"rules: named twice \(got pii_leak\)"),
        ("rule_sets: {pii_leak: {rules: [pii_leak]}}", "and a served rule share this name"),
        (
            one("pii_leak", "{any_of: [pii_leek, pii_leak]}"),
            r"violated_if: not one of the set's rules \(got pii_leek\)\. Did you mean 'pii_leak'",
        ),
        (
            one("pii_leak, refund_promise", "pii_leak"),
            r"violated_if: listed in `rules` but not used in `violated_if` \(got refund_promise\)",
        ),
        (one("pii_leak", "{some_of: [pii_leak]}"), r"a\.violated_if: unknown key \(got some_of\)"),
    ],
)
def test_a_mistake_of_the_file_is_told_its_place(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(GuardError, match=error) as raised:
        load_sets(tmp_path, text)
    assert raised.value.remedy


def test_no_set_reads_more_metadata_than_a_request_can_state(tmp_path: Path) -> None:
    def conditions(keys: int) -> str:
        exception = ", ".join(f"{{metadata: {{k{number}: v}}}}" for number in range(keys))
        return one("pii_leak", f"{{rule: pii_leak, unless: {{any_of: [{exception}]}}}}")

    assert load_sets(tmp_path, conditions(MAX_METADATA))["a"].rules == ("pii_leak",)
    with pytest.raises(GuardError, match=r"violated_if: conditions on more than.*\(got 33\)"):
        load_sets(tmp_path, conditions(MAX_METADATA + 1))
