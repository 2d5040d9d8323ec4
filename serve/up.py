"""The guardrail server: `python -m serve.up`, entry of `make up`. `serve/api` says what it answers.

Knows nothing of vLLM; that is the engine's.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from guard.errors import GuardError, exits_cleanly
from guard.layout import Runs
from guard.method import METHODS
from serve.api.engine_service import EngineService
from serve.api.input.bounded_heads import MAX_HEAD, bounded_heads
from serve.api.observe.record import Observer
from serve.api.observe.server_log import configuration
from serve.cluster.served import ServedOptions
from serve.console import add_console
from serve.engine import GuardEngine
from serve.engine.engines import GuardEngines
from serve.engine.thread.engine_thread import CLOSING_S, EngineThread
from serve.observers import open_observers
from serve.policy.rule_set import RuleSet, load_rule_sets
from serve.registry.reviews import open_reviews
from serve.selection import (
    RegisteredRollouts,
    Selection,
    ServedPart,
    left_out,
    registered,
    served_parts,
    start_warm,
    unpublished,
)
from serve.tenants.tenant_file import Tenants, load_tenants
from serve.tls import tls_settings
from serve.up_arguments import parse_arguments

FAILED = 2  # the exit status
BACKLOG = 2048  # connections that the system holds until they are accepted
# Seconds that an unused connection is kept: longer than clients and proxies keep theirs (httpx 5,
# nginx 60), or one is closed here at the moment that its next request is sent, which is then lost.
KEEP_ALIVE_S = 75


@exits_cleanly
def main() -> None:
    """Serve until SIGINT or SIGTERM."""
    arguments = parse_arguments()
    runs = Runs(arguments.runs.absolute())  # replicas may run elsewhere
    selection = Selection(
        arguments.model, arguments.rules, arguments.method, arguments.merged, runs
    )
    parts = registered(selection, served_parts(selection))
    rule_sets = _rule_sets(arguments.rule_sets, parts)
    tenants = _tenants(arguments.tenants, rule_sets)
    tls = tls_settings(arguments.tls_cert, arguments.tls_key, arguments.tls_client_ca)
    observers = open_observers(arguments.audit_log, arguments.traces, arguments.audit_key)
    review_store = open_reviews(arguments.reviews, selection.runs)
    options = ServedOptions(
        parts,
        arguments.timeout,
        rule_sets,
        tenants,
        arguments.audit_log,
        arguments.traces,
        audit_key=arguments.audit_key,
        review_store=review_store,
        policies=arguments.policies,
        source=RegisteredRollouts(selection, parts),
    )
    running = _cluster_app
    if arguments.replicas is None:
        running = _single_app
    with _listening(arguments.host, arguments.port) as listener:
        _print_loading(parts)
        if line := left_out(selection, parts):
            print(line, flush=True)
        for line in unpublished(selection, parts):
            print(line, flush=True)
        with running(arguments, options, observers) as app:
            add_console(app, selection.runs, tenants)
            _serve(app, listener, arguments.timeout, tls)


def _print_loading(parts: Sequence[ServedPart]) -> None:
    for part in parts:
        names = ", ".join(part.folders)
        label = METHODS[part.method].label
        description = f"{part.recipe.name} with {len(part.folders)} rules ({label})"
        print(f"loading {description}: {names}", flush=True)


def _rule_sets(path: Path | None, parts: Sequence[ServedPart]) -> dict[str, RuleSet]:
    if path is None:
        return {}
    served = [name for part in parts for name in part.folders]
    return load_rule_sets(path, served)


def _tenants(path: Path | None, rule_sets: Mapping[str, RuleSet]) -> Tenants | None:
    if path is None:
        return None
    if not rule_sets:
        remedy = "Name the file that has them with RULESETS="
        raise GuardError("tenants need rule sets, and there are none", where=path, remedy=remedy)
    return load_tenants(path, rule_sets)


class EngineBoundServer(uvicorn.Server):
    """Ends when its engine has failed for good, as a signal would end it."""

    def __init__(self, config: uvicorn.Config, service: EngineService) -> None:
        super().__init__(config)
        self._service = service

    async def on_tick(self, counter: int) -> bool:
        is_over = await super().on_tick(counter)
        return is_over or self._service.thread.failure is not None


def _serve(app: FastAPI, listener: socket.socket, timeout_s: float, tls: Mapping[str, Any]) -> None:
    """Serve an app. Raises GuardError once an engine of this process has failed."""
    config, service = _config(app, timeout_s, tls), app.state.service
    if not isinstance(service, EngineService):
        _answer(uvicorn.Server(config), listener)
        return
    _answer(EngineBoundServer(config, service), listener)
    _end_with_its_engine(service.thread)


@contextlib.contextmanager
def _single_app(
    arguments: argparse.Namespace, options: ServedOptions, observers: Sequence[Observer]
) -> Iterator[FastAPI]:
    """The app around engines in this process. Raises GuardError if they do not start."""

    def start(folders: Mapping[str, Path] | None) -> list[GuardEngine]:
        return start_warm(options.parts, folders, is_merged=arguments.merged)

    with GuardEngines(start) as engine:
        source = options.source
        yield options.app(engine, observers, is_watching=arguments.watch, source=source)


def _cluster_app(
    arguments: argparse.Namespace, options: ServedOptions, observers: Sequence[Observer]
) -> contextlib.AbstractContextManager[FastAPI]:
    """The app in front of replicas in processes of their own."""
    from serve.cluster.start import running_cluster

    watch = arguments.watch
    return running_cluster(arguments.replicas, options, observers=observers, is_watching=watch)


def _config(app: FastAPI, timeout_s: float, tls: Mapping[str, Any]) -> uvicorn.Config:
    # A client that sends its request slowly is waited for no longer than a check may take.
    patience_s = math.ceil(timeout_s + CLOSING_S)
    return uvicorn.Config(
        app,
        http=bounded_heads(patience_s),
        h11_max_incomplete_event_size=MAX_HEAD,
        ws="none",
        log_config=configuration(),
        timeout_graceful_shutdown=patience_s,
        timeout_keep_alive=KEEP_ALIVE_S,
        server_header=False,
        **tls,
    )


def _answer(server: uvicorn.Server, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    scheme = "https" if server.config.is_ssl else "http"
    name = f"[{host}]" if ":" in host else host
    address = f"{scheme}://{name}:{port}"
    print(f"{address}/v1/check is ready; {address}/docs describes it; Ctrl+C stops it", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends it as Ctrl+C does
    # uvicorn raises the signal again after it has shut down.
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])


def _end_with_its_engine(thread: EngineThread) -> None:
    """Raise GuardError if the engine failed for good; where its batch hangs, end the process."""
    if thread.failure is None:
        return
    if thread.hangs_for_good:
        print(f"error: {thread.failure}", file=sys.stderr, flush=True)
        os._exit(FAILED)
    raise thread.failure


def _listening(host: str, port: int) -> socket.socket:
    """The server's socket, bound before the engine starts, so a port in use costs no wait."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        remedy = "Choose another port with PORT=, or an address of this machine with HOST="
        raise GuardError(f"cannot listen on {host}:{port}: {error}", remedy=remedy) from error


if __name__ == "__main__":
    main()
