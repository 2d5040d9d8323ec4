"""Bases as adapters are trained on them: what does not fit is found without weights."""

from __future__ import annotations

import pytest

from guard.errors import GuardError
from tests.train.conftest import ADAPTERS, MakeJob, with_lora
from train.adapter.load import check_adapter


@pytest.mark.parametrize("method", ADAPTERS)
def test_modules_that_the_base_has_not_are_found_without_its_weights(
    make_job: MakeJob, method: str
) -> None:
    check_adapter(make_job(method))
    with pytest.raises(GuardError, match=rf"methods\.{method}\.lora.*q_prj"):
        check_adapter(with_lora(make_job(method), target_modules=["q_prj"]))
