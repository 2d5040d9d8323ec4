from __future__ import annotations

from pathlib import Path

import pytest

from guard.errors import GuardError
from serve.cluster.note import ServedNote, version_of
from serve.registry.rollout import Mode, Rollout
from tests.serve.cluster.words_cluster import noted, trained
from tests.serve.cluster.words_engine import save_words, version


def test_what_is_noted_is_read_again_and_its_version_is_of_weights_and_modes(
    tmp_path: Path,
) -> None:
    with pytest.raises(GuardError, match=r"served\.json.*cannot be read"):
        ServedNote(tmp_path / "served.json").read()
    served = noted(tmp_path, trained(tmp_path)).read()
    assert version_of(dict(reversed(served.items()))) == version_of(served)
    second = Rollout(folder=version(save_words(tmp_path / "manners", b"second")))
    shadow = second.model_copy(update={"mode": Mode.parse("shadow")})
    variants = [served, served | {"manners": second}, served | {"manners": shadow}]
    variants.append({"greeting": served["greeting"]})
    assert len({version_of(variant) for variant in variants}) == 4
    for variant in variants:
        ServedNote(tmp_path / "served.json").write(variant)
        assert ServedNote(tmp_path / "served.json").read() == variant
