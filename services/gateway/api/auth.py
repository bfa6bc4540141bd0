"""The door of the HTTP side: with API keys set, everything but /health and /metrics needs one.

Those two are for load balancers and scrapers, which have none. /cluster shows hosts, processes and settings, so it is
asked for a key as well: any tenant's will do. What is not a route is refused too, so that nothing can be found out by
trying.
"""

from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

from services.gateway.api.context import context_of
from services.gateway.api.errors import ApiError
from services.gateway.keys import Keyring, digest_of

OPEN_PATHS = frozenset({"/health", "/metrics"})
_MISSING = "You did not provide an API key. Send it in a header: 'Authorization: Bearer YOUR_KEY'."
_MALFORMED = "The Authorization header is not of the form 'Bearer YOUR_KEY'."
_UNKNOWN = "The API key you provided is not valid here."


def auth_middleware(keys: Keyring) -> Middleware:
    """Notes the tenant in the request's context, or answers 401."""

    @web.middleware
    async def check(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path not in OPEN_PATHS:
            key = _key_in(request)
            tenant = keys.tenant_of(key)
            if tenant is None:
                raise _refusal(_UNKNOWN, ', error="invalid_token"')
            context = context_of(request)
            context.tenant, context.key = tenant, digest_of(key)
        return await handler(request)

    return check


def _key_in(request: web.Request) -> str:
    given = request.headers.getall("Authorization", [])
    if not given:
        raise _refusal(_MISSING)
    scheme, _, key = given[0].strip().partition(" ")
    key = key.strip()
    if len(given) > 1 or scheme.lower() != "bearer" or not key or " " in key:
        raise _refusal(_MALFORMED, ', error="invalid_request"')
    return key


def _refusal(message: str, detail: str = "") -> ApiError:
    return ApiError(401, message, "invalid_api_key", None, {"WWW-Authenticate": f'Bearer realm="baton"{detail}'})
