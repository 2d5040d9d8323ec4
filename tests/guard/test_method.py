"""The methods, and what follows from where their weights act."""

from __future__ import annotations

import pytest

from guard.errors import GuardError
from guard.method import METHODS, PEFT_WEIGHTS, method_named


def test_methods_act_where_they_say_and_an_unknown_one_is_refused_with_the_nearest() -> None:
    assert [method.name for method in METHODS.values()] == list(METHODS)
    assert len({method.label for method in METHODS.values()}) == len(METHODS)
    assert not METHODS["lora"].shares_conversation
    assert METHODS["alora"].shares_conversation and METHODS["head"].shares_conversation
    assert METHODS["lora"].is_adapter and METHODS["alora"].is_adapter
    for method in METHODS.values():
        assert method.is_adapter == (method.weights == PEFT_WEIGHTS)
    assert METHODS["lora"].is_seeded and METHODS["alora"].is_seeded
    assert not METHODS["head"].is_seeded
    assert method_named("alora") is METHODS["alora"]
    with pytest.raises(GuardError, match=r"no such method \(got alorra\). Did you mean 'alora'"):
        method_named("alorra")
    with pytest.raises(GuardError, match=r"Known: lora, .*alora, head"):
        method_named("xyz")
