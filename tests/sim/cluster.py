"""A whole cluster in one process (see `processes.py`) and its clients."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from services.gateway.flow_settings import GatewayFlowSettings
from services.gateway.generation import GenerationRequest, PathPolicy
from services.prefill.parts import PrefillFlowSettings
from shared.bus.memory import Envelope, MemoryHub
from shared.engine.settings import EngineSettings
from shared.protocol.messages import SamplingSpec
from shared.protocol.wire import KvPrecision
from shared.runtime.errors import BatonError
from shared.runtime.mode import Mode
from shared.runtime.overlap import Overlap
from shared.transfer.fake import FakeNetwork
from tests.sim.processes import Gateway, Process, Worker

BLOCK_TOKENS = 8


@dataclass
class Answer:
    """What a client saw: tokens by choice, how it ended, and the path."""

    tokens: list[list[int]]
    finishes: list[str | None]
    path: str = "pending"
    timings: dict[str, Any] = field(default_factory=dict)
    error: BatonError | None = None


class Cluster:
    """Use as `async with Cluster(...)`: boots everything, and ends it. step_s: how long a step takes. on_built: called
    for each process when its parts are there, before it hears or does anything. reuse: the workers find the state of
    earlier prompts again, in blocks of BLOCK_TOKENS, by a model that keeps all of it by position."""

    def __init__(
        self,
        *,
        prefills: int = 1,
        decodes: int = 1,
        gateways: int = 1,
        page_tokens: int = 4,
        num_pages: int = 64,
        prefill_pages: int | None = None,
        prefill_page_tokens: int | None = None,
        prefill_chunk: int = 8,
        max_running: int = 16,
        growth_tokens: int = 8,
        step_s: float = 0.01,
        stash_bytes: int = 4096,
        optimistic_attempts: int = 0,
        overlap: Overlap = "chunks",
        mode: Mode = "separated",
        step_tokens: int = 32,
        reuse: bool = False,
        policy: Callable[[Envelope], Iterable[float]] | None = None,
        on_built: Callable[[Process], None] = lambda process: None,
    ) -> None:
        self.hub = MemoryHub() if policy is None else MemoryHub(lambda envelope: tuple(policy(envelope)))
        self.network = FakeNetwork()
        self.task_failures: list[str] = []
        self._shape = EngineSettings(
            page_tokens=page_tokens,
            num_pages=num_pages,
            prefill_chunk=prefill_chunk,
            max_step_tokens=4 * prefill_chunk,
            max_running=max_running,
            growth_tokens=growth_tokens,
            stash_bytes=stash_bytes,
            mode=mode,
            step_tokens=step_tokens,
            block_tokens=BLOCK_TOKENS if reuse else None,
        )
        self.reuse = reuse
        self.gateway_flow = GatewayFlowSettings(block_tokens=BLOCK_TOKENS, near_tokens=BLOCK_TOKENS)
        self._prefill_shape = replace(
            self._shape, num_pages=prefill_pages or num_pages, page_tokens=prefill_page_tokens or page_tokens
        )
        self.prefill_flow = PrefillFlowSettings(
            optimistic_attempts=optimistic_attempts, overlap=overlap, layers_per_send=1
        )
        self.step_s = step_s
        self.on_built = on_built
        self.gateways = [Gateway(self, "gateway", f"gateway-{i}") for i in range(gateways)]
        self.prefills = [Worker(self, "prefill", f"prefill-{i}") for i in range(prefills)]
        self.decodes = [Worker(self, "decode", f"decode-{i}") for i in range(decodes)]

    def engine_settings(self, role: str) -> EngineSettings:
        return self._prefill_shape if role == "prefill" else self._shape

    @property
    def gateway(self) -> Gateway:
        return self.gateways[0]

    @property
    def processes(self) -> list[Process]:
        return [*self.prefills, *self.decodes, *self.gateways]

    @property
    def workers(self) -> list[Worker]:
        return [*self.prefills, *self.decodes]

    async def __aenter__(self) -> "Cluster":
        for process in self.processes:
            await process.boot()
        async with asyncio.timeout(5):
            while any(len(gateway.registry.all()) < len(self.processes) for gateway in self.gateways):
                await asyncio.sleep(0.01)
        return self

    async def restart(self, dead: Process) -> Process:
        """The next incarnation of a process that was killed: the same name, another boot id."""
        await dead.kill()
        kinds: dict[str, list[Any]] = {"gateway": self.gateways, "prefill": self.prefills, "decode": self.decodes}
        kind = kinds[dead.role]
        process = type(dead)(self, dead.role, dead.name)
        kind[kind.index(dead)] = process
        await process.boot()
        return process

    async def __aexit__(self, *exc: object) -> None:
        for process in self.processes:
            await process.kill()

    async def ask(
        self,
        prompt: Iterable[int],
        *,
        path: PathPolicy = "auto",
        strict: bool = False,
        timeout_s: float = 60.0,
        kv_precision: KvPrecision = "lossless",
        stop_after: dict[int, int] | None = None,
        leave_after: int | None = None,
        priority: int = 0,
        on_batch: Callable[[Answer], None] = lambda answer: None,
        **sampling: Any,
    ) -> Answer:
        """A client. stop_after: choice -> tokens after which the text side stops it. leave_after: batches after
        which the client goes away. on_batch: told after each of them what has come so far."""
        spec = SamplingSpec(**({"temperature": 0.0, "max_tokens": 8} | sampling))
        request = GenerationRequest(
            "req-sim", tuple(prompt), spec, path, strict, timeout_s, kv_precision=kv_precision, priority=priority
        )
        generation = self.gateway.flow.generate(request)
        answer = Answer([[] for _ in range(spec.n)], [None] * spec.n)
        batches = 0
        try:
            async for batch in generation:
                batches += 1
                for event in batch:
                    assert event.index == len(answer.tokens[event.choice]), "each index once, in order"
                    assert answer.finishes[event.choice] is None, "nothing after the finish"
                    answer.tokens[event.choice].append(event.token)
                    answer.finishes[event.choice] = event.finish
                    if (stop_after or {}).get(event.choice) == len(answer.tokens[event.choice]):
                        generation.stop_choice(event.choice)
                if batches == leave_after:
                    break
                on_batch(answer)
        except BatonError as error:
            answer.error = error
        finally:
            await generation.aclose()
        answer.path, answer.timings = generation.path, generation.timings()
        return answer

    async def settle(self, within_s: float = 10.0) -> None:
        """Waits until nothing is held anywhere; fails with what is still held."""
        deadline = asyncio.get_running_loop().time() + within_s
        while True:
            held = [w.name for w in self.workers if w.alive and not w.is_empty]
            if not held and all(gateway.is_empty for gateway in self.gateways):
                break
            if asyncio.get_running_loop().time() > deadline:
                raise AssertionError(f"still held: {held}, open letterboxes: {[len(g.inbox) for g in self.gateways]}")
            await asyncio.sleep(0.01)
        assert self.task_failures == []


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(200) for _ in range(length))


Scenario = Callable[[], Coroutine[Any, Any, None]]
