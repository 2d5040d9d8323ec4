"""deploy/kubernetes: no Kubernetes is at hand, so the file is read, and what it names exists."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from guard.recipe import load_recipe
from serve.api import probes
from tests.deploy.clients import DEPLOY, assert_understood, timeout_of

FILE = (DEPLOY / "kubernetes" / "deployment.yaml").read_text(encoding="utf-8")
SPECS: dict[str, Any] = {part["kind"]: part["spec"] for part in yaml.safe_load_all(FILE)}
POD: dict[str, Any] = SPECS["Deployment"]["template"]["spec"]
SERVER: dict[str, Any] = POD["containers"][0]
IMAGE = (DEPLOY / "docker" / "Dockerfile").read_text(encoding="utf-8")


def instruction(name: str) -> str:
    """What stands behind it in the image's file, where it stands once."""
    (content,) = re.findall(rf"^{name}\s*(.+)$", IMAGE, re.MULTILINE)
    return str(content)


def test_the_servers_options_are_the_program_s_and_it_ends_after_its_checks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = [*json.loads(instruction("ENTRYPOINT")), *SERVER["args"]]
    options = assert_understood(command, monkeypatch)
    assert options["watch"] and load_recipe(options["model"]).methods
    (port,) = SERVER["ports"]
    assert port["containerPort"] == options["port"]
    pause = SERVER["lifecycle"]["preStop"]["exec"]["command"]
    assert pause[0] == "sleep"
    assert POD["terminationGracePeriodSeconds"] >= int(pause[1]) + timeout_of(options)
    threads = {"name": "OMP_NUM_THREADS", "value": SERVER["resources"]["limits"]["cpu"]}
    assert SERVER["env"] == [threads]


def test_probes_ask_what_the_server_answers() -> None:
    paths = {getattr(route, "path", "") for route in probes.router.routes}
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = SERVER[name]["httpGet"]
        assert asked["path"] in paths and asked["port"] == SERVER["ports"][0]["name"]
    assert SERVER["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_a_pod_reads_the_weights_and_writes_where_the_image_does() -> None:
    mounts = {mount["mountPath"]: mount for mount in SERVER["volumeMounts"]}
    assert mounts.pop(f"{instruction('WORKDIR')}/runs")["readOnly"]
    cache = instruction("ENV XDG_CACHE_HOME").removeprefix("=")
    assert mounts.keys() == {cache, "/home/centurion", "/tmp"}
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    assert {mount["name"] for mount in mounts.values()} | {"runs"} == volumes.keys()
    assert "emptyDir" in volumes["scratch"]
    claim = volumes["runs"]["persistentVolumeClaim"]
    assert claim["readOnly"] and f"name: {claim['claimName']}\n" in FILE
    assert SPECS["PersistentVolumeClaim"]["accessModes"] == ["ReadWriteMany"]  # of several nodes
    assert f"--uid {POD['securityContext']['runAsUser']} " in IMAGE


def test_service_and_budget_choose_the_pods() -> None:
    labels = SPECS["Deployment"]["template"]["metadata"]["labels"]
    assert SPECS["Deployment"]["selector"]["matchLabels"] == labels
    assert SPECS["PodDisruptionBudget"]["selector"]["matchLabels"] == labels
    assert SPECS["PodDisruptionBudget"]["maxUnavailable"] < SPECS["Deployment"]["replicas"]
    service = SPECS["Service"]
    assert service["selector"] == labels and service["sessionAffinity"] == "ClientIP"
    assert service["ports"][0]["targetPort"] == SERVER["ports"][0]["name"]
