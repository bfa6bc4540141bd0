"""What tests of single faults do with a simulated cluster: ask, wait for a state, and bend what is said."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from shared.bus.base import Message
from shared.bus.memory import Envelope
from shared.protocol.wire import WireModel, decode, encode
from tests.sim.cluster import Answer, Cluster, prompt_of
from tests.sim.processes import Worker

M = TypeVar("M", bound=WireModel)
SOON_S = 0.2
STEP_S = 0.05
"""Chunks of eight tokens: a prompt of 160 takes a second."""
LONG = prompt_of(160)
SAMPLING: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True, "timeout_s": 120.0}


def verb_of(envelope: Envelope) -> str:
    return envelope.subject.rsplit(".", 1)[-1]


def now() -> float:
    return asyncio.get_running_loop().time()


async def until(condition: Callable[[], bool], within_s: float) -> float:
    """When it came true, as seconds from now; fails after `within_s`."""
    began = now()
    while not condition():
        assert now() - began <= within_s, f"not within {within_s} s"
        await asyncio.sleep(0.001)
    return now() - began


def asked(cluster: Cluster, prompt: tuple[int, ...] = LONG, **more: Any) -> asyncio.Task[Answer]:
    return asyncio.get_running_loop().create_task(cluster.ask(prompt, **(SAMPLING | more)))


def in_state(worker: Worker, state: str) -> Callable[[], bool]:
    return lambda: worker.desk.tickets.states() == {state: 1}


def intercept(cluster: Cluster, verb: str, kind: type[M], handle: Callable[[M], Awaitable[WireModel]]) -> None:
    """Everything for `verb` goes to `handle` from now on."""
    for subscription in cluster.hub._subscriptions:
        if subscription.pattern.endswith(f".{verb}"):

            async def on_message(message: Message) -> bytes:
                return encode(await handle(decode(kind, message.data)))

            subscription.lane.handler = on_message


def only_once(cluster: Cluster) -> None:
    """No second attempt: the first cause is the client's."""
    cluster.gateway.flow.settings = type(cluster.gateway.flow.settings)(max_attempts=1)
