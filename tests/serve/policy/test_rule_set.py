"""The file of rule sets: what it means, and every mistake named before a server starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from guard.errors import GuardError
from serve.policy.logic import MAX_METADATA
from serve.policy.rule_set import RuleSet, load_rule_sets
from serve.policy.ruling import Ruling

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


def load_text(folder: Path, text: str) -> dict[str, RuleSet]:
    path = folder / "sets.yaml"
    path.write_text(text)
    return load_rule_sets(path, SERVED)


def test_a_set_is_violated_by_any_rule_or_by_its_logic(tmp_path: Path) -> None:
    rule_sets = load_text(tmp_path, FILE)
    everything, support = rule_sets["everything"], rule_sets["support"]
    assert (everything.name, everything.rules) == ("everything", ("medical_advice", "pii_leak"))
    rulings = {
        "medical_advice": Ruling.ALLOW,
        "pii_leak": Ruling.VIOLATION,
        "refund_promise": Ruling.ALLOW,
    }
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
        ("rules: []", r"sets\.yaml: .*unknown key 'rules'"),
        ("rule_sets: {}", r"'rule_sets'.*at least 1"),
        ("rule_sets: {A: {rules: [pii_leak]}}", r"rule_sets\.A"),
        (one(""), r"'rule_sets\.a\.rules'.*at least 1"),
        ("rule_sets: {a: {rules: [pii_leak], if: x}}", r"unknown key 'rule_sets\.a\.if'"),
        (
            one("pi_leak"),
            r"sets\.yaml: rule_sets\.a\.rules: the rule is not served \(got pi_leak\)\. "
            "Did you mean 'pii_leak'",
        ),
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
        (
            one("pii_leak", "{some_of: [pii_leak]}"),
            r"rule_sets\.a\.violated_if: unknown key \(got some_of\)",
        ),
    ],
)
def test_a_mistake_is_told_with_its_place(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(GuardError, match=error) as raised:
        load_text(tmp_path, text)
    assert raised.value.remedy


def test_no_set_reads_more_metadata_than_a_request_can_state(tmp_path: Path) -> None:
    def conditions(keys: int) -> str:
        exception = ", ".join(f"{{metadata: {{k{number}: v}}}}" for number in range(keys))
        return one("pii_leak", f"{{rule: pii_leak, unless: {{any_of: [{exception}]}}}}")

    assert load_text(tmp_path, conditions(MAX_METADATA))["a"].rules == ("pii_leak",)
    with pytest.raises(GuardError, match=r"violated_if: conditions on more than.*\(got 33\)"):
        load_text(tmp_path, conditions(MAX_METADATA + 1))


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(GuardError, match="no such file"):
        load_rule_sets(tmp_path / "sets.yaml", SERVED)
