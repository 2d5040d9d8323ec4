"""The methods, and what follows from where their weights act."""

from __future__ import annotations

import pytest

from guard.errors import GuardError
from guard.method import METHODS, PEFT_WEIGHTS, method_named


def test_every_method_stands_under_its_own_name_with_a_label_of_its_own() -> None:
    assert [method.name for method in METHODS.values()] == list(METHODS)
    assert len({method.label for method in METHODS.values()}) == len(METHODS)


def test_rules_share_the_conversation_unless_the_weights_act_on_all_of_the_prompt() -> None:
    assert not METHODS["lora"].shares_conversation
    assert METHODS["alora"].shares_conversation and METHODS["head"].shares_conversation


def test_an_adapter_changes_what_the_base_computes_and_is_kept_in_peft_s_file() -> None:
    assert METHODS["lora"].is_adapter and METHODS["alora"].is_adapter
    for method in METHODS.values():
        assert method.is_adapter == (method.weights == PEFT_WEIGHTS)


def test_only_what_starts_from_random_weights_is_seeded() -> None:
    assert METHODS["lora"].is_seeded and METHODS["alora"].is_seeded
    assert not METHODS["head"].is_seeded


def test_an_unknown_method_is_refused_with_the_nearest_name() -> None:
    assert method_named("alora") is METHODS["alora"]
    with pytest.raises(GuardError, match=r"no such method \(got alorra\). Did you mean 'alora'"):
        method_named("alorra")
    with pytest.raises(GuardError, match=r"Known: lora, .*alora, head"):
        method_named("xyz")
