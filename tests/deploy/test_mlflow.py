"""Versions kept in a real MLflow server, by one registry, and had from it by another."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from guard.errors import GuardError
from serve.registry.mlflow import MlflowRegistry, model_name
from serve.registry.registry import RegisteredRule
from tests.deploy.clients import environment, program
from tests.serve.cluster.words_engine import save_words
from tests.serve.kept import KeptVersions
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

RULE = RegisteredRule("tiny", "mild", "alora")


def answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health", trust_env=False).is_success
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mlflow")


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """MLflow's own server, on SQLite."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    options = {
        "--backend-store-uri": f"sqlite:///{folder}/mlflow.db",
        "--artifacts-destination": str(folder / "artifacts"),
        "--port": str(port),
        "--workers": "1",
    }
    command = [str(program("mlflow")), "server"]
    for name, value in options.items():
        command += [name, value]
    # A session of its own: its worker is a process beside it.
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(
            command,
            cwd=folder,
            env=environment(MLFLOW_DISABLE_TELEMETRY="true"),
            stdout=log,
            stderr=log,
            start_new_session=True,
        ) as server,
    ):
        try:
            wait_until(lambda: answers(f"http://127.0.0.1:{port}"), 120)
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(server.pid, signal.SIGKILL)


def test_a_version_goes_to_mlflow_and_comes_back_the_same(
    address: str, folder: Path, tmp_path: Path
) -> None:
    ours, theirs = KeptVersions(tmp_path / "ours"), KeptVersions(tmp_path / "theirs")
    first, second = ours.train("mild", b"first"), ours.train("mild", b"second")
    mlflow = MlflowRegistry(f"{address}/")
    assert [mlflow.push(ours.registry, version) for version in (first, second)] == ["1", "2"]
    assert mlflow.push(ours.registry, second) == "2"  # it is there
    query = {"name": model_name(RULE), "alias": "candidate"}
    path = f"{address}/api/2.0/mlflow/registered-models/alias"
    kept = httpx.get(path, params=query).json()["model_version"]
    tags = {tag["key"]: tag["value"] for tag in kept["tags"]}
    assert (kept["description"], tags["version"], tags["parent"]) == ("second", second.id, first.id)
    assert tags["threshold"] == "0.5" and "auroc" in tags
    pulled = mlflow.pull(theirs.registry, RULE, "champion")
    assert (pulled.id, pulled.note) == (first.id, "first (version 1 of MLflow)")
    assert mlflow.pull(theirs.registry, RULE, "2").id == second.id
    # Which publishes nothing.
    assert theirs.registry.aliases(RULE) == {"champion": first.id, "candidate": second.id}
    theirs.registry.verify()
    with pytest.raises(GuardError, match=r"alias previous not found.*VERSION="):
        mlflow.pull(theirs.registry, RULE, "previous")
    with pytest.raises(GuardError, match=r"HTTP 404.*not found"):
        mlflow.pull(theirs.registry, RULE._replace(rule="other"), "7")


def test_what_is_damaged_or_another_rule_s_is_not_registered(
    address: str, folder: Path, tmp_path: Path
) -> None:
    ours, theirs = KeptVersions(tmp_path / "ours"), KeptVersions(tmp_path / "theirs")
    mlflow, rule = MlflowRegistry(address), RULE._replace(rule="stern")
    number = mlflow.push(ours.registry, ours.train("stern", b"stern"))
    query = {"name": model_name(rule), "version": number}
    kept = httpx.get(f"{address}/api/2.0/mlflow/model-versions/get", params=query).json()
    source = kept["model_version"]["source"].removeprefix("mlflow-artifacts:/")
    weights = folder / "artifacts" / source / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for damaged in (whole[:2], b"others"):
        weights.write_bytes(damaged)
        with pytest.raises(GuardError):
            mlflow.pull(theirs.registry, rule, number)
    weights.unlink()
    with pytest.raises(GuardError):
        mlflow.pull(theirs.registry, rule, number)
    for file in save_words(tmp_path / "other", b"other").iterdir():
        weights.with_name(file.name).write_bytes(file.read_bytes())
    with pytest.raises(GuardError, match="another rule's"):
        mlflow.pull(theirs.registry, rule, number)
    assert not theirs.registry.rules()


def test_a_server_that_is_not_there_or_is_none_is_told(tmp_path: Path) -> None:
    kept = KeptVersions(tmp_path)
    version = kept.train("mild", b"first")
    for url in ("http://127.0.0.1:1", "nowhere", "http://[", ""):
        with pytest.raises(GuardError, match=r"MLflow is not reached.*MLFLOW=http"):
            MlflowRegistry(url).push(kept.registry, version)
