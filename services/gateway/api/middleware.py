"""Around every handler: a context, and every failure as an answer with OpenAI's body."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

from services.gateway.api.context import RequestContext, open_context
from services.gateway.api.errors import ApiError, from_baton, from_http, internal
from services.gateway.api.metrics import HttpMetrics
from services.gateway.api.sse import ClientGone
from shared.runtime.errors import BatonError

log = logging.getLogger(__name__)
CLIENT_GONE = 499


def error_middleware(metrics: HttpMetrics) -> Middleware:
    @web.middleware
    async def answer(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        context = open_context(request)
        status = CLIENT_GONE
        try:
            response = await _answer(request, handler, context)
            status = CLIENT_GONE if context.cause == ClientGone.code else response.status
            return response
        except asyncio.CancelledError:
            context.cause = ClientGone.code
            raise
        finally:
            route = request.match_info.route.name or "none"
            metrics.requests.labels(route, str(status)).inc()
            if context.cause is not None:
                metrics.errors.labels(context.cause).inc()

    return answer


async def _answer(
    request: web.Request,
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    context: RequestContext,
) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        failure = error
    except BatonError as error:
        failure = from_baton(error)
    except web.HTTPException as error:
        failure = from_http(error)
    except Exception:
        log.exception("request %s of %s failed", context.request_id, context.tenant)
        failure = internal()
    context.cause = failure.code
    return failure.response()
