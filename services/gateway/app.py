"""The gateway's HTTP application: what it is made of, its routes, and the runner that serves it."""

import importlib.metadata
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry

from services.gateway.api.auth import auth_middleware
from services.gateway.api.completions import Completions
from services.gateway.api.context import add_headers
from services.gateway.api.guests import Guests
from services.gateway.api.limits import HttpLimits
from services.gateway.api.metrics import HttpMetrics
from services.gateway.api.middleware import error_middleware
from services.gateway.api.status import Status
from services.gateway.generation import Generator
from services.gateway.keys import Keyring
from services.gateway.streams.desk import Streams
from shared.text.tokenizer import TextModel

DISTRIBUTION = "baton-serving"


def installed_version() -> str:
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


@dataclass(frozen=True, slots=True)
class GatewayDeps:
    """What the HTTP side is given. It owns none of it.

    model_names: what clients may ask for; each is listed. health: None while requests can be served, else why not.
    cluster: the body of GET /cluster. registry: the process's own. guests: who is being served; its owner ends them.
    keys: who may ask; None: everybody. streams: those that can be resumed; None: none can. now: seconds since 1970, for
    `created`.
    """

    generator: Generator
    text: TextModel
    model_names: tuple[str, ...]
    max_model_len: int
    registry: CollectorRegistry
    health: Callable[[], str | None]
    cluster: Callable[[], Mapping[str, Any]]
    limits: HttpLimits = field(default_factory=HttpLimits)
    guests: Guests = field(default_factory=Guests)
    keys: Keyring | None = None
    streams: Streams | None = None
    version: str = field(default_factory=installed_version)
    now: Callable[[], float] = time.time


def create_app(deps: GatewayDeps) -> web.Application:
    """To be served by `create_runner`: clients that leave are noticed only there."""
    metrics = HttpMetrics(deps.registry)
    doors = [error_middleware(metrics), *([] if deps.keys is None else [auth_middleware(deps.keys)])]
    app = web.Application(client_max_size=deps.limits.body_bytes, middlewares=doors)
    app.on_response_prepare.append(add_headers)
    completions = Completions(
        deps.generator,
        deps.text,
        deps.model_names,
        deps.max_model_len,
        deps.limits,
        metrics,
        deps.now,
        deps.guests,
        deps.streams,
    )
    status = Status(
        deps.model_names,
        deps.max_model_len,
        deps.registry,
        deps.health,
        deps.cluster,
        deps.version,
        deps.now,
        deps.limits.mode,
    )
    app.router.add_post("/v1/chat/completions", completions.chat, name="chat")
    app.router.add_post("/v1/completions", completions.complete, name="completions")
    app.router.add_get("/v1/streams/{id}", completions.resume, name="streams")
    app.router.add_get("/v1/models", status.models, name="models")
    app.router.add_get("/v1/models/{model:.+}", status.model, name="model")
    app.router.add_get("/health", status.health, name="health")
    app.router.add_get("/metrics", status.metrics, name="metrics")
    app.router.add_get("/cluster", status.cluster, name="cluster")
    app.router.add_get("/version", status.version, name="version")
    return app


def create_runner(app: web.Application, *, shutdown_timeout_s: float = 10.0) -> web.AppRunner:
    """Serves `app` so that a client that leaves cancels its handler, and with it the generation."""
    return web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=shutdown_timeout_s)
