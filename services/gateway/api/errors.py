"""Failures as clients see them: OpenAI's error body and the right status, whatever went wrong and where."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from aiohttp import web

from shared.runtime.errors import BatonError, Corrupt, TransferError

_TYPE_BY_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    499: "request_cancelled",
}
_CODE_BY_STATUS = {
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    417: "expectation_failed",
}
INTERNAL_MESSAGE = "The server failed to serve the request."


@dataclass
class ApiError(Exception):
    """An answer that is an error. `param` names the field that is to blame, in the form `messages[0].role`."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    @property
    def type(self) -> str:
        fallback = "server_error" if self.status >= 500 else "invalid_request_error"
        return _TYPE_BY_STATUS.get(self.status, fallback)

    def body(self) -> bytes:
        """`{"error": {…}}`; ASCII, so that a lone surrogate a client sent can be quoted back."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()

    def response(self) -> web.Response:
        return web.Response(status=self.status, body=self.body(), content_type="application/json", headers=self.headers)


def invalid(message: str, param: str | None, code: str | None = "invalid_value") -> ApiError:
    """The client's mistake: 400."""
    return ApiError(400, message, code, param)


def internal() -> ApiError:
    """Ours. The cause goes to the log, not to the client."""
    return ApiError(500, INTERNAL_MESSAGE, BatonError.code)


def from_baton(error: BatonError) -> ApiError:
    """A failure of the cluster. Transfers are an inner matter: a client need only know that a retry may help."""
    status = error.http_status
    if isinstance(error, TransferError) and not isinstance(error, Corrupt):
        status = 503
    headers: dict[str, str] = {}
    if error.retry_after_s is not None or status in (429, 503):
        headers["Retry-After"] = str(max(1, round(error.retry_after_s or 1.0)))
    return ApiError(status, error.message, error.code, error.param, headers)


def from_http(error: web.HTTPException) -> ApiError:
    """What aiohttp itself refuses: unknown routes, methods, bodies too large."""
    code = _CODE_BY_STATUS.get(error.status, "http_error")
    headers = {name: error.headers[name] for name in ("Allow", "Location") if name in error.headers}
    return ApiError(error.status, error.text or error.reason, code, None, headers)
