"""What belongs to one HTTP request while it is answered, and the headers that every answer carries."""

import re
from dataclasses import dataclass, field

from aiohttp import web

from services.gateway.generation import DEFAULT_TENANT
from shared.runtime.ids import new_request_id

PENDING = "pending"
_ECHOED = re.compile(r"^[\x21-\x7e]{1,128}$")


@dataclass(slots=True)
class RequestContext:
    """request_id is ours; client_id is what the client called it, never used as a key. tenant: by its API key."""

    request_id: str = field(default_factory=new_request_id)
    client_id: str | None = None
    tenant: str = DEFAULT_TENANT
    path: str = PENDING
    key: str = ""
    """Digest of the API key; empty where none are asked for."""
    stream: str | None = None
    """The resumable stream that is answered with."""
    cause: str | None = None
    """The code of the failure that ended the request, for the counters."""


_KEY: web.RequestKey[RequestContext] = web.RequestKey("baton.context", RequestContext)


def open_context(request: web.Request) -> RequestContext:
    client_id = request.headers.get("x-request-id", "")
    context = RequestContext(client_id=client_id if _ECHOED.match(client_id) else None)
    request[_KEY] = context
    return context


def context_of(request: web.Request) -> RequestContext:
    found = request.get(_KEY)
    return open_context(request) if found is None else found


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """aiohttp's `on_response_prepare`: runs for every answer, streams and errors included."""
    context = context_of(request)
    response.headers["x-baton-request-id"] = context.request_id
    response.headers["x-baton-path"] = context.path
    if context.stream is not None:
        response.headers["x-baton-stream-id"] = context.stream
    if context.client_id is not None:
        response.headers["x-request-id"] = context.client_id
