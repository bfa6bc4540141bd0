"""Takes all chance and all addresses out of a run, so that a seed replays exactly; and what a run need not do twice."""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any
from unittest import mock

from shared.protocol import wire


class _SeededSecrets:
    """Stands in for the module `secrets`."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"secrets of {seed}")

    def token_bytes(self, num_bytes: int = 32) -> bytes:
        return self._rng.randbytes(num_bytes)

    def token_hex(self, num_bytes: int = 32) -> str:
        return self.token_bytes(num_bytes).hex()

    def randbelow(self, limit: int) -> int:
        return self._rng.randrange(limit)

    def randbits(self, count: int) -> int:
        return self._rng.getrandbits(count)


@lru_cache(maxsize=256)
def _decoded(kind: Any, data: bytes) -> Any:
    return wire.decode(kind, data)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Ids come from `seed`; a heartbeat that all hear is decoded once."""
    _decoded.cache_clear()
    fakes = _SeededSecrets(seed)
    with ExitStack() as stack:
        for place in ("shared.runtime.ids.secrets", "services.decode.desk.secrets"):
            stack.enter_context(mock.patch(place, fakes))
        for place in ("shared.worker.gateway_watch.decode", "services.gateway.workers.decode"):
            stack.enter_context(mock.patch(place, _decoded))
        yield
