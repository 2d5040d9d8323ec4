from __future__ import annotations

import os
from pathlib import Path

import pytest

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.method import WORDS
from guard.weights.card import load_card
from serve.cluster.snapshots import Snapshots, version_of
from serve.registry.rollout import Rollout
from tests.serve.cluster.words_cluster import trained
from tests.serve.cluster.words_engine import save_words
from tests.serve.encoder_rules import save_encoder_rule
from tests.signed import sign


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_words(tmp_path / "greeting", b"first")


@pytest.fixture
def snapshots(tmp_path: Path) -> Snapshots:
    return Snapshots(tmp_path / "served")


def test_a_copy_stays_as_it_was_whatever_lies_in_the_folder_by_then(
    snapshots: Snapshots, folder: Path
) -> None:
    first = snapshots.keep(folder)
    assert snapshots.keep(folder) == first
    card = load_card(folder)
    save_words(folder, b"second")
    assert load_card(first) == card != load_card(folder)
    assert snapshots.keep(folder) != first
    (folder / "adapter_config.json").write_text('{"r": 8}')
    with pytest.raises(GuardError, match=r"adapter_config\.json is another file"):
        snapshots.keep(folder)
    sign(folder)
    assert snapshots.keep(folder).name == load_card(folder).version[:32]


def test_a_link_within_the_folder_is_copied_as_the_file_and_one_that_leads_out_is_refused(
    tmp_path: Path, snapshots: Snapshots, folder: Path
) -> None:
    weights = folder / "adapter_model.safetensors"
    weights.rename(folder / "of-monday")
    weights.symlink_to("of-monday")
    copy = snapshots.keep(folder)
    (folder / "of-monday").unlink()
    assert not (copy / weights.name).is_symlink()
    assert (copy / weights.name).read_bytes() == b"first"
    weights.unlink()
    (tmp_path / "outside").write_bytes(b"first")
    weights.symlink_to("../outside")
    with pytest.raises(GuardError, match=r"greeting/adapter_model.*leads out of its folder"):
        snapshots.keep(folder)


def test_the_words_of_an_encoder_s_adapter_are_copied_with_it(
    tmp_path: Path, snapshots: Snapshots
) -> None:
    texts = [[Message("user", "My head hurts.")]]
    folder = save_encoder_rule(tmp_path / "rule", seed=1, texts=texts)
    copy = snapshots.keep(folder)
    assert (copy / WORDS).read_bytes() == (folder / WORDS).read_bytes()
    assert load_card(copy).version == load_card(folder).version


def test_what_is_served_is_noted_whatever_fails_behind_it_and_its_version_is_of_the_bytes(
    tmp_path: Path, snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(GuardError, match="cannot be read"):
        snapshots.read()
    snapshots.keep_all(trained(tmp_path))
    served = snapshots.read()
    version = version_of(served)
    assert version_of(dict(reversed(served.items()))) == version
    second = Rollout(folder=snapshots.keep(save_words(tmp_path / "manners", b"second")))
    later = served | {"manners": second}
    assert len({version, version_of(later), version_of({"greeting": served["greeting"]})}) == 3

    def refuse(path: Path) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(os, "utime", refuse)
    snapshots.write(later)
    assert snapshots.read() == later
