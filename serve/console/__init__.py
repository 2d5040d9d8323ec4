"""The console: pages on which people see what the rules say and decide which versions are served.

Every page is made here, and works without a script. Knows nothing of engines and of replicas.
"""

from __future__ import annotations

from fastapi import FastAPI

from guard.layout import Runs
from serve.console import files, login, reviews, rules, trying
from serve.console.site import Console
from serve.registry.registry import Registry
from serve.tenants.tenant_file import Tenants


def add_console(app: FastAPI, runs: Runs, tenants: Tenants | None = None) -> None:
    """Have the app of an engine, or of replicas, answer the pages, of what is in `runs`."""
    app.state.console = Console(runs, Registry(runs), tenants)
    for module in (rules, files, reviews, trying, login):
        app.include_router(module.router)
