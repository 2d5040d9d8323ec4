from typing import get_args

from guard.recipe import Kind
from serve.engine.backends.start import STARTS


def test_every_kind_of_base_has_a_start() -> None:
    assert set(STARTS) == set(get_args(Kind))
