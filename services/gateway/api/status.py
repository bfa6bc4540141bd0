"""The routes that only tell: models, health, metrics, the cluster, the version."""

from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry

from services.gateway.api.body import shown
from shared.runtime.errors import ModelNotFound
from shared.runtime.mode import Mode
from shared.runtime.telemetry import render_metrics


class Status:
    def __init__(
        self,
        model_names: tuple[str, ...],
        max_model_len: int,
        registry: CollectorRegistry,
        health: Callable[[], str | None],
        cluster: Callable[[], Mapping[str, Any]],
        version: str,
        now: Callable[[], float],
        mode: Mode,
    ) -> None:
        self._registry = registry
        self._health = health
        self._cluster = cluster
        self._version = version
        self._mode = mode
        self._models = {
            name: {
                "id": name,
                "object": "model",
                "created": int(now()),
                "owned_by": "baton",
                "max_model_len": max_model_len,
            }
            for name in model_names
        }

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": list(self._models.values())})

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        found = self._models.get(name)
        if found is None:
            raise ModelNotFound(f"The model '{shown(name)}' does not exist.", param="model")
        return web.json_response(found)

    async def health(self, request: web.Request) -> web.Response:
        """200 once a request can be served; 503 with the reason before, and when the cluster is wedged."""
        reason = self._health()
        if reason is None:
            return web.json_response({"status": "ok", "mode": self._mode})
        return web.json_response({"status": "unavailable", "mode": self._mode, "reason": reason}, status=503)

    async def metrics(self, request: web.Request) -> web.Response:
        body, content_type = render_metrics(self._registry)
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def cluster(self, request: web.Request) -> web.Response:
        return web.json_response(self._cluster())

    async def version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self._version})
