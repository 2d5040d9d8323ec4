"""Versions exchanged with an MLflow model registry, over its REST API.

A rule on a base by a method is a registered model there, `centurion.MODEL.RULE.METHOD`. A version
is a model version of a run, whose artifacts are its files. Nothing of MLflow is installed for it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from guard.errors import GuardError
from guard.weights.card import load_card, read_card
from serve.registry.history import recorded
from serve.registry.registry import RegisteredRule, Registry, Version, user_name

API = "/api/2.0/mlflow"
ARTIFACTS = "/api/2.0/mlflow-artifacts/artifacts"
PROXIED = "mlflow-artifacts"  # the scheme of files that the server keeps
EXPERIMENT = "centurion"
SHARED = ("champion", "candidate")  # aliases that go along with a version
TIMEOUT_S = 60.0
TAGS = ("version", "parent", "threshold", "auroc")
USE_KEY = "Set MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
USE_VERSION = "Push it first, or name another VERSION="
USE_URL = "Name the server's address, as MLFLOW=http://host:5000, and see that it runs"


class _Exists(GuardError):
    """What was to be made is there."""


class MlflowRegistry:
    """The model registry of the server at `url`. Every call raises GuardError where it fails."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._options: dict[str, Any] = {"timeout": TIMEOUT_S}
        if user := os.environ.get("MLFLOW_TRACKING_USERNAME"):
            self._options["auth"] = (user, os.environ.get("MLFLOW_TRACKING_PASSWORD", ""))
        elif token := os.environ.get("MLFLOW_TRACKING_TOKEN"):
            self._options["headers"] = {"authorization": f"Bearer {token}"}

    def push(self, registry: Registry, version: Version) -> str:
        """Keep the version there, with the aliases that it has here; its number there."""
        load_card(version.folder)  # raises for damaged weights
        model = model_name(version.rule)
        number = self._number(model, version.id) or self._create(model, version)
        for alias, named in registry.aliases(version.rule).items():
            if named == version.id and alias in SHARED:
                stated = {"name": model, "alias": alias, "version": number}
                self._ask("POST", f"{API}/registered-models/alias", json=stated)
        return number

    def pull(self, registry: Registry, rule: RegisteredRule, named: str) -> Version:
        """Register the version that an alias or a number names there; no version 0 gives way."""
        path, query = "registered-models/alias", {"name": model_name(rule), "alias": named}
        if named.isdecimal():
            path, query = "model-versions/get", {"name": model_name(rule), "version": named}
        kept = self._told("GET", f"{API}/{path}", "model_version", params=query)
        with tempfile.TemporaryDirectory(prefix="mlflow-") as scratch:
            folder = Path(scratch)
            self._download(str(kept.get("source")), folder)
            card = read_card(folder)
            if RegisteredRule.of(card) != rule:
                got = RegisteredRule.of(card)
                raise GuardError("the weights are another rule's", where=self._url, got=got)
            note = f"{kept.get('description', '')} (version {kept.get('version')} of MLflow)"
            by = {"actor": user_name(), "note": note.strip()}
            return registry.register(folder, **by, follows_zero=False)

    def _number(self, model: str, version: str) -> str | None:
        """What the version is there; None if it is not."""
        query = {"filter": f"name = '{model}' AND tags.version = '{version}'"}
        answer = self._told("GET", f"{API}/model-versions/search", params=query)
        for kept in answer.get("model_versions", ()):
            return str(kept["version"])
        return None

    def _create(self, model: str, version: Version) -> str:
        """Upload the files, then make a version of them: what is named there is whole."""
        for kind, name in (("registered-models", model), ("experiments", EXPERIMENT)):
            with contextlib.suppress(_Exists):
                self._ask("POST", f"{API}/{kind}/create", json={"name": name})
        path, query = f"{API}/experiments/get-by-name", {"experiment_name": EXPERIMENT}
        experiment = self._told("GET", path, "experiment", "experiment_id", params=query)
        now_ms = round(time.time() * 1000)
        run = {"experiment_id": experiment, "run_name": str(version.rule), "start_time": now_ms}
        info = self._told("POST", f"{API}/runs/create", "run", "info", json=run)
        source = f"{info['artifact_uri']}/version"
        for file in sorted(version.folder.iterdir()):
            self._ask("PUT", _place(source, file.name), content=file.read_bytes())
        card = recorded(version).model_dump()
        stated = {
            "name": model,
            "source": source,
            "run_id": info["run_id"],
            "description": version.note,
            "tags": [{"key": key, "value": str(card[key] or "")} for key in TAGS],
        }
        path, answer = f"{API}/model-versions/create", ("model_version", "version")
        number = self._told("POST", path, *answer, json=stated)
        ended = {"run_id": info["run_id"], "status": "FINISHED", "end_time": now_ms}
        self._ask("POST", f"{API}/runs/update", json=ended)
        return str(number)

    def _download(self, source: str, folder: Path) -> None:
        query = {"path": _place(source).removeprefix(f"{ARTIFACTS}/")}
        for file in self._told("GET", ARTIFACTS, params=query).get("files", ()):
            name = str(file["path"])
            if not file["is_dir"] and name == Path(name).name:
                (folder / name).write_bytes(self._ask("GET", _place(source, name)).content)

    def _told(self, method: str, path: str, *keys: str, **options: Any) -> Any:
        """What the answer has under these keys."""
        response = self._ask(method, path, **options)
        try:
            value = response.json()
            for key in keys:
                value = value[key]
        except (ValueError, LookupError, TypeError) as error:
            raise GuardError("no answer of MLflow's", where=self._url, remedy=USE_URL) from error
        return value

    def _ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            response = httpx.request(method, self._url + path, **self._options, **options)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            problem, got = "MLflow is not reached", repr(error)
            raise GuardError(problem, where=self._url, got=got, remedy=USE_URL) from error
        if response.is_success:
            return response
        said, status = response.text[:500], response.status_code
        if "RESOURCE_ALREADY_EXISTS" in said:
            raise _Exists(said)
        remedy = {401: USE_KEY, 403: USE_KEY}.get(status, USE_VERSION)
        raise GuardError(f"MLflow: HTTP {status}: {said}", where=self._url, remedy=remedy)


def model_name(rule: RegisteredRule) -> str:
    return ".".join(("centurion", *rule))


def _place(source: str, name: str = "") -> str:
    """The path of a file of a model version. Raises GuardError for one that lies elsewhere."""
    parts = urlsplit(source)
    if parts.scheme != PROXIED:
        remedy = "Start MLflow with --serve-artifacts, and push it again"
        raise GuardError("MLflow does not keep the files itself", got=source, remedy=remedy)
    return quote(f"{ARTIFACTS}/{parts.path.strip('/')}/{name}".rstrip("/"))
