"""deploy/docker: no container engine is at hand here, so the files are read, not built.

What they name exists: files, make's targets, the server's options, metrics' path, boards.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.clients import DEPLOY, ROOT, assert_understood, output, timeout_of

FOLDER = DEPLOY / "docker"
DOCKERFILE = FOLDER / "Dockerfile"
COMPOSE = FOLDER / "compose.yaml"


def of(name: str) -> list[str]:
    """What stands behind this instruction in the Dockerfile, each time."""
    text = re.sub(r"^(#.*)?\n", "", DOCKERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [line.partition(" ")[2].strip() for line in lines if line.startswith(f"{name} ")]


def load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content


def test_what_is_copied_exists_and_is_not_ignored_and_holds_what_the_server_imports() -> None:
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert "DEVICE=${DEVICE}" in next(run for run in of("RUN") if "make setup" in run)
    copied = set()
    for rest in of("COPY"):
        *sources, _ = rest.split()
        for source in sources:
            assert (ROOT / source).exists(), source
            assert f"!{source.split('/')[0]}" in ignored
            copied.add(source)
    assert {"guard", "serve", "recipes", "setup", "Makefile", "pyproject.toml"} <= copied


def test_the_server_is_started_where_the_port_is_exposed(monkeypatch: pytest.MonkeyPatch) -> None:
    entry, command = json.loads(of("ENTRYPOINT")[0]), json.loads(of("CMD")[0])
    options = assert_understood([*entry, *command], monkeypatch)
    assert options["host"] == "0.0.0.0"
    assert [str(options["port"])] == of("EXPOSE")
    health = of("HEALTHCHECK")[0]
    assert f"http://127.0.0.1:{options['port']}/healthz" in health
    program = json.loads(health.partition("CMD ")[2])
    compile(program[2], "HEALTHCHECK", "exec")


def test_the_composed_server_is_the_image_s_server(monkeypatch: pytest.MonkeyPatch) -> None:
    server = load(COMPOSE)["services"]["server"]
    build = server["build"]
    assert (FOLDER / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]) == DOCKERFILE
    options = assert_understood([*json.loads(of("ENTRYPOINT")[0]), *server["command"]], monkeypatch)
    assert server["ports"] == [f"127.0.0.1:{options['port']}:{options['port']}"]
    runs = server["volumes"][0].split(":")
    assert (FOLDER / runs[0]).resolve() == ROOT / "runs"
    assert runs[1] == f"{of('WORKDIR')[0]}/runs"
    grace = int(server["stop_grace_period"].removesuffix("s"))
    assert grace >= timeout_of(options)
    cuda = load(FOLDER / "compose.cuda.yaml")["services"]["server"]
    assert cuda["build"]["args"] == {"DEVICE": "cuda"}


def test_prometheus_asks_the_composed_server_and_grafana_prometheus() -> None:
    services = load(COMPOSE)["services"]
    (job,) = load(FOLDER / "prometheus.yaml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["server:8000"]}]
    assert job["metrics_path"] == "/metrics"
    (source,) = load(FOLDER / "grafana" / "datasources" / "prometheus.yaml")["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    (provider,) = load(FOLDER / "grafana" / "dashboards" / "centurion.yaml")["providers"]
    mounted = dict(volume.split(":")[:2][::-1] for volume in services["grafana"]["volumes"])
    boards = FOLDER / mounted[provider["options"]["path"]]
    assert [path.name for path in boards.resolve().glob("*.json")] == ["centurion.json"]
    for name, service in services.items():
        for volume in service["volumes"]:
            path = volume.split(":")[0]
            if path.startswith(".") and not path.endswith("runs"):
                assert (FOLDER / path).exists(), f"{name}: {volume}"
        assert "build" in service or re.search(r":v?\d+\.\d+\.\d+$", service["image"])
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


@pytest.mark.slow
def test_a_compose_file_is_as_the_specification_says() -> None:
    files = [str(COMPOSE), str(FOLDER / "compose.cuda.yaml")]
    assert "ok" in output("check-jsonschema", "--builtin-schema", "vendor.compose-spec", *files)
