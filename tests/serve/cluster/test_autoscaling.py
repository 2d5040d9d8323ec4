"""Replicas that start, or do not: as many as the load needs, on a Ray of each test's own."""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from guard.errors import GuardError
from serve.cluster.size import ReplicaRange, ScalingPace
from tests.serve.cluster.words_cluster import REPLICA, alone, body, ray_cluster, trained
from tests.serve.cluster.words_engine import BAD, SLOWLY, VIOLATES, save_words
from tests.serve.serving import serving
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

# Ray looks at the load of 30 s, and waits as long again.
AT_ONCE = ScalingPace(every_s=0.5, look_back_s=2.0, up_s=0.5)


def test_ray_is_told_how_many_replicas_and_how_soon_and_how_long_a_check_takes() -> None:
    from serve.cluster.ray_pool import guard_deployment  # Ray, which quick tests do not have

    size = ReplicaRange(1, 3).scaled_down_after(45.0)
    config = guard_deployment(size, {}, timeout_s=600.0)._deployment_config
    assert config.graceful_shutdown_timeout_s > 600
    scaling = config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 3)
    assert (scaling.downscale_delay_s, scaling.upscale_delay_s) == (45.0, 30.0)
    assert guard_deployment(ReplicaRange(2, 2), {})._deployment_config.autoscaling_config is None


def test_a_second_replica_starts_under_load_and_nothing_goes_on_after_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    is_over = threading.Event()
    statuses: set[int] = set()
    replicas: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="guard-", ignore_cleanup_errors=True) as folder:
        folders = trained(Path(folder))
        with (
            ray_cluster(Path(folder), ReplicaRange(1, 2, AT_ONCE), folders) as app,
            serving(app) as client,
            ThreadPoolExecutor(40) as pool,
        ):
            assert "guard_replicas 1.0" in client.get("/metrics").text

            def send(sender: int) -> None:
                number = 0
                while not is_over.is_set():
                    number += 1
                    text = f"{SLOWLY} {VIOLATES} {sender} {number}"
                    with alone(client) as own:
                        answer = own.post("/v1/check", json=body(text))
                    statuses.add(answer.status_code)
                    assert answer.json()["verdict"] == "violation"
                    replicas.add(answer.headers[REPLICA])

            futures = [pool.submit(send, sender) for sender in range(40)]
            try:
                wait_until(lambda: len(replicas) == 2, 120)
            finally:
                is_over.set()
            for future in futures:
                future.result()
    assert statuses == {200}
    serve_log = logging.getLogger("ray.serve")  # which hands nothing on
    serve_log.addHandler(caplog.handler)
    time.sleep(3 * AT_ONCE.every_s)
    serve_log.removeHandler(caplog.handler)
    assert caplog.text == ""


def test_a_replica_that_does_not_start_is_an_error_with_its_words() -> None:
    with tempfile.TemporaryDirectory(prefix="guard-", ignore_cleanup_errors=True) as folder:
        folders = trained(Path(folder))
        save_words(folders["manners"], BAD)
        with (
            pytest.raises(GuardError, match=r"a replica does not start: .*these weights are bad"),
            ray_cluster(Path(folder), ReplicaRange(1, 1), folders),
        ):
            pytest.fail("it started")
