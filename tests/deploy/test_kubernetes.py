"""deploy/kubernetes: no Kubernetes is at hand, so the files are read, and the application that they
name is run on Ray as it stands there.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from guard.errors import GuardError
from guard.recipe import load_recipe
from serve.cluster.size import ReplicaRange
from serve.cluster.snapshots import Snapshots
from serve.registry.rollout import Rollout
from tests.deploy.clients import DEPLOY, ROOT
from tests.serve.api.streaming import OpenStream, streamed
from tests.serve.guarded import save_adapter

FOLDER = DEPLOY / "kubernetes"
DOCKERFILE = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
RULES = ("medical_advice", "pii_leak")
BODY = {"messages": [{"role": "user", "content": "My head hurts."}]}
STREAM = BODY | {"rules": ["pii_leak"], "every_tokens": 1, "hold_back": 0}


@pytest.mark.slow
def test_an_application_that_begins_as_before_goes_on_and_old_notes_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from serve.cluster.kubernetes import _served_last  # which imports Ray
    from serve.cluster.service import UNUSED_S

    def served(rules: str) -> Snapshots:
        return _served_last(root, {rule: folders[rule] for rule in rules})

    root = tmp_path / "copies"
    folders: dict[str, Path] = {}
    for seed, rule in enumerate("abc"):
        folders[rule] = save_adapter(tmp_path / rule, rule, seed=seed)
    first = served("ab")
    added = Rollout(folder=first.keep(folders["c"]))
    first.write({**first.read(), "c": added})
    assert sorted(served("ab").read()) == ["a", "b", "c"]
    other = served("bc")
    assert sorted(other.read()) == ["b", "c"]
    assert sorted(served("ab").read()) == ["a", "b", "c"]
    assert other.note.is_file()  # it may be running still
    os.utime(other.note, (0, time.time() - UNUSED_S - 1))
    served("ab")
    assert other.note.is_file()  # it is one of the last
    monkeypatch.setattr("serve.cluster.kubernetes.KEPT_NOTES", 1)
    served("ab")
    assert first.note.is_file() and not other.note.is_file()


def documents() -> dict[str, dict[str, Any]]:
    """The documents of the file, by their kind."""
    text = (FOLDER / "rayservice.yaml").read_text(encoding="utf-8")
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def application() -> dict[str, Any]:
    (found,) = yaml.safe_load(documents()["RayService"]["spec"]["serveConfigV2"])["applications"]
    assert isinstance(found, dict)
    return found


def test_the_service_names_the_ray_that_is_pinned_and_an_application_that_exists() -> None:
    cluster = documents()["RayService"]["spec"]["rayClusterConfig"]
    pins = (ROOT / "setup" / "cluster.txt").read_text(encoding="utf-8")
    assert f"ray=={cluster['rayVersion']}\n" in pins
    assert cluster["authOptions"] == {"mode": "token"}
    assert application()["import_path"] == "serve.cluster.kubernetes:build"  # as the tests below
    assert load_recipe(application()["args"]["model"]).methods


@pytest.mark.slow
def test_a_size_that_cannot_be_is_refused(tmp_path: Path) -> None:
    from serve.cluster.kubernetes import ApplicationArguments, build  # which imports Ray

    ranged = ApplicationArguments(runs=tmp_path, replicas="2-4", scale_down=60)
    assert ranged.size == ReplicaRange(2, 4).scaled_down_after(60)
    wrong: dict[str, dict[str, Any]] = {
        "'replicas': must be a number such as 2 or 1-4": {"replicas": "two"},
        "scale_down needs a range": {"replicas": "2", "scale_down": 60},
    }
    for problem, changed in wrong.items():
        with pytest.raises(GuardError, match=problem):
            build({"runs": str(tmp_path)} | changed)


def test_every_pod_has_the_image_the_volume_room_for_a_replica_and_an_audit_log() -> None:
    cluster = documents()["RayService"]["spec"]["rayClusterConfig"]
    volume, arguments = documents()["PersistentVolumeClaim"], application()["args"]
    (group,) = cluster["workerGroupSpecs"]
    assert f"{group['minReplicas']}-{group['maxReplicas']}" == arguments["replicas"]
    for spec in (cluster["headGroupSpec"], group):
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        assert container["image"] == "centurion-ray:cpu"
        assert container["volumeMounts"] == [{"name": "runs", "mountPath": arguments["runs"]}]
        claim = pod["volumes"][0]["persistentVolumeClaim"]["claimName"]
        assert claim == volume["metadata"]["name"]
        # KubeRay 1.5 takes Ray's ports where the container has none, and no other where it has.
        assert "ports" not in container
    assert volume["spec"]["accessModes"] == ["ReadWriteMany"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert float(limits["cpu"]) >= arguments["cpus"]
    text = (FOLDER / "rayservice.yaml").read_text(encoding="utf-8")
    (path,) = re.findall(r"^ *(?:# )?audit_log: (\S+)", text, re.MULTILINE)
    assert path.startswith(arguments["runs"])
    assert "{hostname}" in path and "{pid}" in path  # every process has a log of its own


def test_the_image_installs_ray_as_make_does_and_finds_our_code() -> None:
    assert "FROM centurion:${DEVICE}" in DOCKERFILE
    (install,) = re.findall(r"^RUN .*(bash setup/\S+)$", DOCKERFILE, re.MULTILINE)
    assert (ROOT / shlex.split(install)[1]).is_file()
    base = (DEPLOY / "docker" / "Dockerfile").read_text(encoding="utf-8")
    (place,) = re.findall(r"^WORKDIR (\S+)$", base, re.MULTILINE)
    assert f"PYTHONPATH={place}" in DOCKERFILE and f"{place}/.venv/bin/ray" in DOCKERFILE
    assert "COPY setup setup" in base
    assert application()["args"]["runs"] == f"{place}/runs"


@pytest.mark.slow
def test_rule_sets_are_of_what_is_served_last_and_of_what_was_removed(tmp_path: Path) -> None:
    from serve.cluster import kubernetes  # which imports Ray

    for seed, rule in enumerate(("kept", "removed", "added")):
        save_adapter(tmp_path / "tiny" / rule / "alora", rule, seed=seed)
    sets = tmp_path / "sets.yaml"
    arguments = kubernetes.ApplicationArguments(
        runs=tmp_path, rules="kept,removed", rule_sets=sets, timeout=600
    )

    def options_with(*rules: str) -> kubernetes.IngressOptions:
        sets.write_text(f"rule_sets: {{support: {{rules: [{', '.join(rules)}]}}}}")
        return kubernetes._ingress_options(arguments)

    noted = options_with("kept", "removed").snapshots
    # As an administrator does while it runs.
    added = Rollout(folder=noted.keep(tmp_path / "tiny" / "added" / "alora"))
    noted.write({"kept": noted.read()["kept"], "added": added})
    again = options_with("kept", "removed", "added")
    assert again.served.rule_sets["support"].rules == ("kept", "removed", "added")
    with pytest.raises(GuardError, match="the rule is not served"):
        options_with("kept", "nobody")


@pytest.mark.slow
def test_ray_is_told_the_times_and_numbers_and_the_ingress_logs_as_the_server_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from serve.cluster import kubernetes  # which imports Ray

    save_adapter(tmp_path / "tiny" / "pii_leak" / "alora", "pii_leak", seed=0)
    arguments = {"runs": str(tmp_path), "timeout": 600, "replicas": "1-3", "scale_down": 45}
    ingress = kubernetes.build(arguments)._bound_deployment
    replicas, options = ingress.init_args
    for deployment in (ingress, replicas._bound_deployment):
        assert deployment._deployment_config.graceful_shutdown_timeout_s > 600
    scaling = replicas._bound_deployment._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 3)
    assert (scaling.downscale_delay_s, scaling.upscale_delay_s) == (45.0, 30.0)
    pipes: list[Path | None] = []
    monkeypatch.setattr(kubernetes, "log_into", pipes.append)
    no_handle: Any = None
    kubernetes.ServedIngress(no_handle, options).__serve_build_asgi_app__()
    assert pipes == [None]


@pytest.fixture
def on_ray(uncompiled: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    """A client of Ray Serve's proxy, on a Ray as others run it."""
    import ray
    from ray import serve

    os.environ.setdefault("RAY_AUTH_TOKEN", "0" * 64)  # Ray reads it once in a process
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with tempfile.TemporaryDirectory(prefix="guard-", ignore_cleanup_errors=True) as folder:
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            num_cpus=8,
            object_store_memory=10**8,
            _temp_dir=folder,
            _node_ip_address="127.0.0.1",
        )
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        address = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=address, timeout=60, trust_env=False) as client:
            yield client
        serve.shutdown()
        ray.shutdown()


@pytest.mark.slow
def test_the_application_answers_on_ray_by_the_arguments_of_the_file(
    tmp_path: Path, on_ray: httpx.Client
) -> None:
    from ray import serve

    from serve.cluster.kubernetes import build

    for seed, rule in enumerate(RULES):
        save_adapter(tmp_path / "tiny" / rule / "alora", rule, seed=seed)
    arguments = application()["args"] | {"runs": str(tmp_path), "replicas": "2", "cpus": 1}
    serve.run(build(arguments), name="centurion")
    answer = on_ray.post("/v1/check", json=BODY)
    assert answer.status_code == 200
    assert tuple(result["rule"] for result in answer.json()["results"]) == RULES
    assert answer.headers["x-guard-replica"]
    assert on_ray.post("/admin/rules/pii_leak").json()["rule"] == "pii_leak"
    assert on_ray.get("/readyz").json() == {"status": "ok"}
    assert "guard_replicas 2.0" in on_ray.get("/metrics").text
    assert on_ray.post("/v1/check", json={"messages": 1}).status_code == 422

    async def first_line(stream: OpenStream) -> None:
        stream.write({"append": "Rest a while."})
        assert "error" not in await stream.read()  # while the body is still sent

    streamed(on_ray, STREAM, first_line)
    assert (tmp_path / "cluster").is_dir()
