"""One client's stream as a benchmark follows it: when each token came, and what the server said about it at the end."""

import json
import threading
import time
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException
from itertools import pairwise
from typing import Any, Self
from urllib.parse import urlparse

from shared.runtime.settings import DEFAULT_MODEL

_TIMEOUT_S = 600.0


class Stream:
    """`with Stream(url, prompt, max_tokens=64) as stream:` has sent the request; it is read in a thread of its own. The
    prompt is token ids. error: what went wrong, None where all is well."""

    def __init__(self, url: str, prompt: Sequence[int], max_tokens: int, **options: Any) -> None:
        address = urlparse(url)
        self._connection = HTTPConnection(str(address.hostname), address.port, timeout=_TIMEOUT_S)
        body = {
            "model": DEFAULT_MODEL,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
        }
        self._body = json.dumps({"temperature": 0.0} | body | options | {"baton": {"timings": True, "token_ids": True}})
        self.sent_at = 0.0
        self.tokens: list[int] = []
        self.came_at: list[float] = []
        """`time.monotonic()` of each token, as `sent_at`."""
        self.timings: dict[str, Any] = {}
        self.error: str | None = "no answer yet"
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Self:
        self.sent_at = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._thread.join(10.0)

    def wait_tokens(self, count: int) -> None:
        """Until it has so many. RuntimeError where it ended before."""
        while len(self.tokens) < count:
            if not self._thread.is_alive():
                raise RuntimeError(f"the stream ended after {len(self.tokens)} tokens: {self.error}")
            time.sleep(0.005)

    def finish(self) -> Self:
        """Waits for its end. RuntimeError where that was none in order."""
        self._thread.join(_TIMEOUT_S)
        if self.error is not None:
            raise RuntimeError(f"the stream broke after {len(self.tokens)} tokens: {self.error}")
        return self

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.came_at)]

    @property
    def recovery(self) -> dict[str, Any]:
        """The last one. RuntimeError where there was none."""
        if not self.timings.get("recovery"):
            raise RuntimeError("nothing was recovered: was another worker killed than the one that served it?")
        last: dict[str, Any] = self.timings["recovery"][-1]
        return last

    def _read(self) -> None:
        try:
            self._connection.request("POST", "/v1/completions", self._body, {"Content-Type": "application/json"})
            answer = self._connection.getresponse()
            if answer.status != 200:
                self.error = f"status {answer.status}: {answer.read().decode(errors='replace')[:300]}"
                return
            while line := answer.readline():
                data = line.decode().strip().removeprefix("data: ")
                if data == "[DONE]":
                    self.error = None
                elif data:
                    self._take(json.loads(data))
        except (OSError, HTTPException, ValueError) as error:
            self.error = f"{type(error).__name__}: {error}"

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            raise ValueError(event["error"])
        for choice in event.get("choices", ()):
            new = choice.get("token_ids") or ()
            self.tokens += new
            self.came_at += [time.monotonic()] * len(new)
        self.timings = (event.get("baton") or {}).get("timings") or self.timings
