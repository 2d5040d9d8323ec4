from typing import get_args

import pytest

from guard.errors import GuardError
from guard.recipe import Kind
from serve.engine.backends.start import STARTS, start_decoder
from tests.serve.cards import prompts, recipe


def test_what_vllm_would_fail_at_later_is_refused_before_it_starts() -> None:
    with pytest.raises(GuardError, match="specialize_active_lora"):
        start_decoder(recipe(), [], {"specialize_active_lora": True}, prompts())


def test_every_kind_of_base_has_a_start() -> None:
    assert set(STARTS) == set(get_args(Kind))
