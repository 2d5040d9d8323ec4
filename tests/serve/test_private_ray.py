"""Ray for one process: one after another in it, with a token that stands in no file."""

from __future__ import annotations

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]


def test_one_ray_after_another_starts_and_writes_nothing_into_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from serve.private_ray import private_ray

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for _ in range(2):
        with (
            tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as scratch,
            private_ray(Path(scratch), 1, {"GUARD_TEST": "handed on"}),
        ):
            look = ray.remote(lambda: (os.environ["GUARD_TEST"], os.environ["RAY_AUTH_MODE"]))
            assert ray.get(look.remote()) == ("handed on", "token")
        assert not ray.is_initialized()
    assert not (tmp_path / "home" / ".ray").exists()
