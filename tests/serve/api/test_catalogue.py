"""What may be asked: rules by name, rule sets by name, and never both."""

from __future__ import annotations

import pytest
from starlette.exceptions import HTTPException

from serve.api.catalogue import Catalogue
from serve.policy.rule_set import RuleSet

CATALOGUE = Catalogue(
    rules={"a": "card of a", "b": "card of b"},  # type: ignore[dict-item]
    rule_sets={"both": RuleSet.any_of(["a", "b"])},
)


def test_rules_are_found_by_name_and_all_without_one() -> None:
    assert CATALOGUE.card("a") == "card of a"
    assert CATALOGUE.selected(["b", "b"]).rules == ("b",)
    assert CATALOGUE.selected(None).rules == ("a", "b")
    assert CATALOGUE.selected(None, "both") is CATALOGUE.rule_sets["both"]


def test_what_is_not_there_is_404_and_both_at_once_a_mistake() -> None:
    for rules, rule_set, status in ((["c"], None, 404), (None, "c", 404), (["a"], "both", 422)):
        with pytest.raises(HTTPException) as raised:
            CATALOGUE.selected(rules, rule_set)
        assert raised.value.status_code == status


def test_the_nearest_of_what_may_be_asked_is_named_and_nothing_else_of_it() -> None:
    """Of a caller who may ask for some rules, the others' names stay unknown."""
    catalogue = Catalogue(
        rules={"pii_leak": "card", "toxicity": "card"},  # type: ignore[dict-item]
        rule_sets={"safety": RuleSet.any_of(["toxicity"])},
    )
    with pytest.raises(HTTPException, match="Did you mean 'pii_leak'"):
        catalogue.card("pii_leek")
    with pytest.raises(HTTPException, match="Did you mean 'safety'"):
        catalogue.rule_set("safty")
    assert catalogue.nearest_rule("x") == "GET /v1/rules lists them"
    assert catalogue.nearest_rule("pii_leak" * 20) == "GET /v1/rules lists them"
    assert "pii_leak" not in catalogue.limited_to(["safety"]).nearest_rule("pii_leek")
