"""What tests ask a real cluster, and what they get: requests, answers, and waiting with a deadline."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

MODEL = "smollm2-135m-instruct"
_POLL_S = 0.05

Report = dict[str, Any]


def poll(what: Callable[[], Any], why: Callable[[], str] | str, within_s: float) -> Any:
    """The first true value of `what`; AssertionError with `why` after `within_s`. Where `what` asks by HTTP and gets
    no answer in time, that is a `not yet`."""
    deadline = time.monotonic() + within_s
    while not (value := _now(what)):
        if time.monotonic() > deadline:
            raise AssertionError(f"after {within_s:g} s: {why if isinstance(why, str) else why()}")
        time.sleep(_POLL_S)
    return value


def _now(what: Callable[[], Any]) -> Any:
    try:
        return what()
    except httpx.TimeoutException:
        return None


@dataclass(frozen=True)
class Answer:
    """One answer of the gateway. `body` is the JSON, also of an error."""

    status: int
    body: dict[str, Any]
    headers: Mapping[str, str]

    @property
    def path(self) -> str:
        return self.headers["x-baton-path"]

    @property
    def choices(self) -> list[dict[str, Any]]:
        assert self.status == 200, self.body
        return list(self.body["choices"])

    @property
    def token_ids(self) -> list[int]:
        """Of the first choice; needs `"baton": {"token_ids": true}`."""
        return list(self.choices[0]["token_ids"])


def body_of(*, baton: Mapping[str, object] | None = None, **body: Any) -> dict[str, Any]:
    """A request's body: greedy, with token ids, unless `body` says otherwise. `baton` is added to."""
    return {"model": MODEL, "temperature": 0, "baton": {"token_ids": True, **(baton or {})}} | body


async def complete(
    http: httpx.AsyncClient, *, route: str = "/v1/completions", baton: Mapping[str, object] | None = None, **body: Any
) -> Answer:
    """As `RealCluster.complete`, through an `async_client`."""
    return answer_of(await http.post(route, json=body_of(baton=baton, **body)))


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def answer_of(response: httpx.Response) -> Answer:
    return Answer(response.status_code, response.json(), response.headers)
