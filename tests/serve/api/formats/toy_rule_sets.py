"""Rule sets of a ToyEngine's rules, for the tests of wire formats. Tests only."""

from __future__ import annotations

from serve.policy.logic import parse
from serve.policy.rule_set import RuleSet

LOGITS = {"flagged": -1.0, "fine": -2.0}  # the threshold is 0.25
STAFF = {"rule": "flagged", "unless": {"metadata": {"audience": "staff"}}}
RULE_SETS = {
    "both": RuleSet(("flagged", "fine"), parse({"all_of": ["flagged", "fine"]}, "both"), "both"),
    "staff": RuleSet(("flagged",), parse(STAFF, "staff"), "staff"),
}
