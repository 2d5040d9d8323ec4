"""Logic over verdicts: what is unjudged never becomes an allow, and what decided is said."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guard.errors import GuardError
from serve.policy.logic import MAX_DEPTH, Decision, Facts, any_rule, parse
from serve.policy.ruling import Ruling

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


WITHOUT_NEGATION = st.recursive(
    st.sampled_from(RULES),
    lambda children: st.builds(
        lambda kind, parts: {kind: parts},
        st.sampled_from(["any_of", "all_of"]),
        st.lists(children, min_size=1, max_size=3),
    ),
    max_leaves=8,
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


@given(EXPRESSIONS, RULINGS, METADATA)
def test_an_allow_and_a_violation_stay_whatever_the_missing_verdicts_say(
    content: Any, rulings: dict[str, Ruling], metadata: dict[str, str]
) -> None:
    result = evaluate(content, rulings, metadata).ruling
    if result is not UNJUDGED:
        for completed, stated in completions(rulings, metadata):
            assert evaluate(content, completed, stated).ruling is result


@given(EXPRESSIONS)
def test_where_nothing_is_judged_and_nothing_stated_nothing_is_allowed(content: Any) -> None:
    assert evaluate(content, {}).ruling is UNJUDGED
    assert evaluate(content, dict.fromkeys(RULES, UNJUDGED)).ruling is UNJUDGED


@given(EXPRESSIONS, RULINGS, METADATA)
def test_what_is_fully_judged_has_a_verdict(
    content: Any, rulings: dict[str, Ruling], metadata: dict[str, str]
) -> None:
    for completed, stated in completions(rulings, metadata):
        assert evaluate(content, completed, stated).ruling is not UNJUDGED


@given(WITHOUT_NEGATION, RULINGS, st.sampled_from(RULES))
def test_without_unless_a_further_violation_allows_nothing(
    content: Any, rulings: dict[str, Ruling], rule: str
) -> None:
    order = list(Ruling)
    before = evaluate(content, rulings).ruling
    after = evaluate(content, rulings | {rule: VIOLATION}).ruling
    assert order.index(after) >= order.index(before)


@given(EXPRESSIONS, RULINGS, METADATA, RULINGS)
def test_what_did_not_decide_changes_no_verdict(
    content: Any, rulings: dict[str, Ruling], metadata: dict[str, str], others: dict[str, Ruling]
) -> None:
    decision = evaluate(content, rulings, metadata)
    assert decision.decided_by
    kept = {rule: one for rule, one in rulings.items() if rule in decision.decided_by}
    if decision.ruling is not UNJUDGED:
        assert evaluate(content, others | kept, metadata).ruling is decision.ruling


@given(RULINGS)
def test_any_rule_is_any_of(rulings: dict[str, Ruling]) -> None:
    expected = evaluate({"any_of": list(RULES)}, rulings)
    assert any_rule(RULES).evaluate(Facts(rulings, {})) == expected


def test_unless_lets_pass_what_its_exception_is_known_to_hold_for() -> None:
    content = {"rule": "a", "unless": "b"}
    for exception, expected in ((VIOLATION, ALLOW), (ALLOW, VIOLATION), (UNJUDGED, UNJUDGED)):
        assert evaluate(content, {"a": VIOLATION, "b": exception}).ruling is expected
    assert evaluate(content, {"a": ALLOW, "b": UNJUDGED}) == (ALLOW, ("a",))


def test_conditions_on_metadata_hold_for_any_of_their_values_and_all_of_their_keys() -> None:
    content = {"rule": "a", "unless": {"metadata": {"region": ["eu", "uk"], "tier": "staff"}}}
    violated = {"a": VIOLATION}
    staff = {"tier": "staff"}
    assert evaluate(content, violated, {"region": "uk", **staff}).ruling is ALLOW
    assert evaluate(content, violated, {"region": "us", **staff}).ruling is VIOLATION
    unstated = evaluate(content, violated, staff)
    assert unstated == (UNJUDGED, ("metadata.region",))


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


def test_an_expression_may_be_deep_but_not_endless() -> None:
    assert evaluate(nested(MAX_DEPTH), {"a": VIOLATION}).ruling is VIOLATION
    with pytest.raises(GuardError, match="nested more than"):
        parse(nested(MAX_DEPTH + 1), "test")


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (7, r"test: neither a rule's name nor a mapping \(got 7\)"),
        ({}, rf"test: {ONE_KIND} \(got nothing\)"),
        ({"anyof": ["a"]}, r"test: unknown key \(got anyof\)\. Did you mean 'any_of'\?"),
        ({"any_of": ["a"], "all_of": ["b"]}, rf"{ONE_KIND} \(got any_of, all_of\)"),
        ({"unless": "a"}, rf"{ONE_KIND} \(got unless\)"),
        ({"any_of": []}, r"test\.any_of: not a list \(got \[\]\)"),
        ({"any_of": "a"}, r"test\.any_of: not a list"),
        ({"all_of": ["a", {"any_of": [None]}]}, r"test\.all_of\.1\.any_of\.0: neither"),
        ({"rule": "a", "unless": {"nor": "b"}}, r"test\.unless: unknown key"),
        ({"metadata": {}}, r"test\.metadata: not a mapping"),
        ({"metadata": {"tier": 1}}, r"test\.metadata\.tier: not a text \(got 1\).*quotes"),
        ({"metadata": {"tier": []}}, r"test\.metadata\.tier: no value"),
        ({"metadata": {1: "a"}}, r"test\.metadata: not a text \(got 1\)"),
        ({"metadata": {"k" * 65: "a"}}, r"test\.metadata: longer than the 64 characters"),
        ({"metadata": {"tier": ["a", "v" * 201]}}, r"metadata\.tier: longer than the 200"),
    ],
)
def test_what_is_no_expression_is_told_where_and_how_to_write_it(content: Any, error: str) -> None:
    with pytest.raises(GuardError, match=error) as raised:
        parse(content, "test")
    assert raised.value.remedy
