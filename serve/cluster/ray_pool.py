"""Ray Serve under a cluster of replicas: started, asked, stopped.

The router is Ray's own, by consistent hashing of the session: of N replicas one more takes over a
share of 1/(N+1) of the conversations, and those of one that is gone are spread over the others.
Pinned to Ray 2.60, because the options of its router differ between versions.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray._private import auto_init_hook
from ray._private import worker as ray_worker
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from guard.errors import GuardError
from guard.machine.device import usable_cores
from serve.cluster.messages import (
    CheckLost,
    RelayedCheck,
    RelayedRequest,
    RelayedResponse,
    ReplicaAnswer,
    ReplicaLost,
)
from serve.cluster.note import ServedNote
from serve.cluster.replica import GuardReplica, StartApp
from serve.engine.thread.engine_thread import MAX_OPEN, MAX_QUEUED, TIMEOUT_S

log = logging.getLogger(__name__)

APPLICATION, DEPLOYMENT = "centurion", "guard"
ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
# A replica with this many takes no more, and the next one on the ring answers: later, since it does
# not have the conversation. As many wait as are in the engine.
MAX_ONGOING = 2 * MAX_OPEN
HEALTH_PERIOD_S = 1.0
FINISHING_S = 30.0  # seconds beyond a check's that a stopping process has
LOOK_S = 5.0  # seconds in which Ray's controller says which replicas run
QUIET = {"log_level": "ERROR", "enable_access_log": False}
OBJECT_STORE_BYTES = 512 * 2**20  # for data on its way between processes; more goes to disk


class RayReplica(GuardReplica):
    """A replica as Ray makes one."""

    async def __init__(  # type: ignore[misc]  # Ray waits for it
        self, start_app: StartApp, note: ServedNote
    ) -> None:
        context = serve.get_replica_context()
        super().__init__(context.replica_id.unique_id, start_app, note)
        await self.start()

    async def __del__(self) -> None:
        await self.close()  # Ray calls this at its end, and waits


class RayPool:
    """Replicas behind a handle of Ray Serve."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._look: asyncio.Task[int] | None = None

    async def ask(self, relayed: RelayedRequest, key: str, version: str) -> RelayedResponse:
        answered: RelayedResponse = await self._call("ask", key, relayed, version)
        return answered

    async def check(self, relayed: RelayedCheck, key: str, version: str) -> ReplicaAnswer:
        answer: ReplicaAnswer = await self._call("check", key, relayed, version)
        return answer

    async def _call(self, method: str, key: str, *arguments: Any) -> Any:
        """What the replica that has the key's conversations says. Raises ReplicaLost."""
        handle = self._handle.options(session_id=key, method_name=method)
        response = handle.remote(*arguments)
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except (RayError, RayServeException, GuardError) as error:
            raise _lost(error) from error

    async def each(
        self, method: str, *arguments: Any, within_s: float, may_miss: bool = False
    ) -> list[ReplicaAnswer]:
        """As `Replicas.each`. A replica that dies meanwhile is left out."""
        replica_answers: list[ReplicaAnswer] = []
        for answer in await self._broadcast(method, arguments, within_s):
            if isinstance(answer, ReplicaAnswer):
                replica_answers.append(answer)
            elif isinstance(answer, TimeoutError):
                if not may_miss:
                    raise _late(within_s)
            elif not isinstance(answer, RayActorError):
                raise _lost(answer) from answer
        if not replica_answers:
            raise ReplicaLost("no replica answers", remedy="Try again in a few seconds")
        return replica_answers

    async def _broadcast(
        self, method: str, arguments: Sequence[Any], within_s: float
    ) -> list[ReplicaAnswer | BaseException]:
        """The answer of each replica, or its error; TimeoutError for a replica that is late.

        Each is waited for by itself: Ray's own timeout is one for all of them together.
        """
        broadcast = self._handle.broadcast(method, *arguments)
        try:
            sent = await asyncio.wait_for(broadcast._fetch_replica_results_async(), within_s)
        except (RayError, RayServeException) as error:
            raise _lost(error) from error
        except TimeoutError:
            raise _late(within_s) from None
        waiting = [asyncio.wait_for(result.get_async(), within_s) for result in sent]
        answers: list[ReplicaAnswer | BaseException] = await asyncio.gather(
            *waiting, return_exceptions=True
        )
        return answers

    async def running(self) -> int:
        """As `Replicas.running`, as far as Ray's controller knows.

        There is one look at a time, which all wait for: a silent controller holds its thread.
        """
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(asyncio.to_thread(self._count_running))
        try:
            return await asyncio.wait_for(asyncio.shield(self._look), LOOK_S)
        except TimeoutError:
            raise ReplicaLost(f"Ray did not say within {LOOK_S:g} s which replicas run") from None
        except (RayError, RayServeException) as error:
            raise _lost(error) from error

    def _count_running(self) -> int:
        status = serve.status()
        application = status.applications.get(self._handle.app_name)
        if application is None:
            return 0
        states = application.deployments[self._handle.deployment_name].replica_states
        return int(states.get("RUNNING", 0))


def _late(within_s: float) -> ReplicaLost:
    return ReplicaLost(f"a replica did not answer within {within_s:g} s")


def _lost(error: BaseException) -> ReplicaLost:
    """The caller's error for one of Ray's, or a replica's own; the rest is for the log.

    A replica that raises has not judged.
    """
    if isinstance(error, BackPressureError):
        return ReplicaLost("too many checks are waiting", remedy="Try again later")
    if isinstance(error, RayActorError):
        return CheckLost("the replica that had the check has died", remedy="Try again")
    if isinstance(error, RayTaskError):
        error = error.cause
    # Its text may quote a request; the replica's own log has the place.
    log.error("a replica could not be asked: %s", type(error).__name__)
    return CheckLost("no replica could be asked; the server's log says why", remedy="Try again")


@contextlib.contextmanager
def deployed_replicas(
    replicas: int, start_app: StartApp, note: ServedNote, timeout_s: float = TIMEOUT_S
) -> Iterator[RayPool]:
    """Replicas of what the note says is served, on the Ray that runs.

    A check has `timeout_s` seconds. Raises GuardError if a replica does not start.
    """
    application = _deployment(replicas, timeout_s).bind(start_app, note)
    with contextlib.ExitStack() as until_ended:
        until_ended.callback(_delete)
        try:
            handle = serve.run(
                application, name=APPLICATION, route_prefix=None, logging_config=QUIET
            )
        except RuntimeError as error:
            raise _not_started() from error
        # Its thread pushes metrics, and would after the end of Ray too.
        until_ended.callback(handle.shutdown)
        yield RayPool(handle)


def _delete() -> None:
    """Replicas finish their checks and end; the rest ends with Ray."""
    with contextlib.suppress(RayError, RayServeException, TimeoutError):
        serve.delete(APPLICATION)


def _deployment(replicas: int, timeout_s: float) -> serve.Deployment:
    return serve.deployment(
        RayReplica,
        name=DEPLOYMENT,
        num_replicas=replicas,
        max_ongoing_requests=MAX_ONGOING,
        max_queued_requests=MAX_QUEUED,
        health_check_period_s=HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=timeout_s + FINISHING_S,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options=actor_options(replicas),
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        logging_config=QUIET,
    )


def actor_options(processes: int) -> dict[str, Any]:
    """What a replica takes of this machine: a GPU, where vLLM uses them, or else a share of it.

    Raises GuardError if there are fewer GPUs than such processes.
    """
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if not gpus or importlib.metadata.version("torch").endswith("+cpu"):
        return {"num_cpus": 1}
    if processes > gpus:
        problem = f"a replica takes a GPU, and there are {gpus}"
        raise GuardError(problem, got=processes, remedy="Ask for fewer with REPLICAS=")
    return {"num_cpus": 1, "num_gpus": 1}


@contextlib.contextmanager
def serve_on_ray(replicas: int, scratch: Path) -> Iterator[None]:
    """A Ray of this process's own, on this machine, without a word of its own on the terminal, for
    so many replicas, its files in `scratch`, a folder with a short path.

    Its processes know each other by a token, which Ray would else write into the home folder, for
    all clusters of the user; RAY_AUTH_MODE, which it has read when it was imported, is left alone.
    """
    settings = {
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # Ray puts its workers behind whatever else runs
        "OMP_NUM_THREADS": str(max(1, len(usable_cores()) // replicas)),
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    for logger in ("ray", "ray.serve"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    # Ray prints its errors on stdout, whatever `log_to_driver` says.
    ray_worker.print_to_stdstream = _log_ray_error
    # Asking Ray after its end would start another one, as threads of Ray Serve do.
    auto_init_hook.enable_auto_connect = False
    ray.init(
        address="local",
        num_cpus=2 * replicas,  # places: one that ends keeps its own while another starts
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=OBJECT_STORE_BYTES,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(scratch),
    )
    try:
        serve.start(proxy_location="Disabled", logging_config=QUIET)
        yield
    finally:
        ray.shutdown()


def _log_ray_error(data: Mapping[str, Any], ignore_prefix: bool) -> None:
    for line in data["lines"]:  # that a process has died, for example: its first sentence
        log.warning("Ray: %s", line.partition(". ")[0])


def _not_started() -> GuardError:
    """Why replicas do not start: the last words of the error that Ray's controller has."""
    problem = "a replica does not start"
    for application in serve.status().applications.values():
        for deployment in application.deployments.values():
            words = [line for line in deployment.message.splitlines() if "GuardError" in line]
            if words:
                problem += f": {words[-1].partition('GuardError: ')[2]}"
    return GuardError(problem, remedy="Start it without REPLICAS= to see the whole error")
