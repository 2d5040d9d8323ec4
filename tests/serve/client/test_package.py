"""The client as a package of its own: a wheel that needs nothing of the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from guard.home import ROOT

pytestmark = pytest.mark.slow

ASKS = """
import sys
import centurion_client
from centurion_client import AsyncGuardClient, CheckFailed, GuardClient
assert "serve" not in sys.modules and "guard" not in sys.modules
try:
    GuardClient("http://127.0.0.1:9").check([{"role": "user", "content": "Hi"}])
except CheckFailed as failure:
    print(centurion_client.__file__, failure)
"""


def test_a_wheel_of_the_client_works_outside_the_checkout(tmp_path: Path) -> None:
    source = tmp_path / "client"  # building leaves files beside the sources
    shutil.copytree(ROOT / "serve/client", source, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps"]
    build = [*pip, "--no-build-isolation", "-w", str(tmp_path), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("centurion_client-*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(installed)  # which is what installing it does, in seconds less
    modules = {path.name for path in (ROOT / "serve/client").glob("*.py")}
    in_package = {name.split("/")[1] for name in names if name.startswith("centurion_client/")}
    assert in_package == modules | {"py.typed"}
    asked = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(installed)!r})\n{ASKS}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert asked.returncode == 0, asked.stderr
    assert str(installed) in asked.stdout and "no response from" in asked.stdout
