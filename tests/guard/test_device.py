"""The device that the installed torch was built for."""

from importlib import metadata

import pytest

from guard.device import installed_device


@pytest.mark.parametrize(
    ("version", "device"), [("2.13.0+cpu", "cpu"), ("2.13.0", "cuda"), ("2.13.0+cu130", "cuda")]
)
def test_a_build_for_cpus_says_so_in_its_version(
    version: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    assert installed_device() == device


def test_without_torch_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert installed_device() == "cpu"
