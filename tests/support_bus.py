"""How NATS turns somebody away, heard on a machine of any speed."""

import asyncio
import re
from collections.abc import Awaitable, Callable

import pytest

from shared.bus.base import BusError

_UNHEARD = "no answer|reset|Broken pipe|unexpected EOF"


async def refusal(said: str, attempt: Callable[[], Awaitable[object]]) -> str:
    """Why `attempt` fails: the message of its BusError, in which `said` (a pattern) is found. On a busy machine that
    word may come after our patience is over, and then `attempt` is made again; any other error is a failure."""
    async with asyncio.timeout(60):
        while True:
            with pytest.raises(BusError) as caught:
                await attempt()
            if re.search(said, str(caught.value)):
                return str(caught.value)
            assert re.search(_UNHEARD, str(caught.value)), str(caught.value)
