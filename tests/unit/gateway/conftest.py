"""A real gateway HTTP server on a real socket, in front of a generator that plays a script.

The tokenizer has one token for each byte, so that a test says exactly where a character or a stop string is cut.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import ClientSession, web
from prometheus_client import CollectorRegistry
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from services.gateway.api.guests import Guests
from services.gateway.api.limits import HttpLimits
from services.gateway.app import GatewayDeps, create_app, create_runner
from services.gateway.generation import GenerationRequest, TokenEvent
from services.gateway.keys import Keyring
from services.gateway.streams.desk import Streams
from shared.protocol.messages import FinishReason, TokenLogprob
from shared.text.files import TOKENIZER_FILE, TextSettings
from shared.text.tokenizer import TextModel

MODEL = "toy"
MAX_MODEL_LEN = 512
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Batch = tuple[TokenEvent, ...]
Step = Batch | Exception | asyncio.Event
Script = Callable[[GenerationRequest], Sequence[Step]]


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """Token i is byte i in the order of GPT-2's table; then <|im_start|> and <|im_end|>."""
    directory: Path = tmp_path_factory.mktemp("text")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: rank for rank, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    tokenizer.save(str(directory / TOKENIZER_FILE))
    TextSettings(
        bos_token_id=256, eos_token_ids=(257,), add_bos=False, chat_template=TEMPLATE, special_tokens={}
    ).write(directory)
    return TextModel.load(directory)


class ScriptedGeneration:
    """Plays its steps: a batch is delivered, an exception raised, an event waited for."""

    def __init__(self, request: GenerationRequest, steps: Sequence[Step]) -> None:
        self.request = request
        self.stopped: list[int] = []
        self.closed = asyncio.Event()
        self.num_delivered = 0
        self.path = "pending"
        self.cached_tokens = 0
        self.close_delay = 0.0
        self._steps = steps

    def __aiter__(self) -> AsyncIterator[Batch]:
        return self._play()

    async def _play(self) -> AsyncIterator[Batch]:
        for step in self._steps:
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif isinstance(step, Exception):
                raise step
            else:
                live = tuple(event for event in step if event.choice not in self.stopped)
                if live:
                    self.path = "local" if self.request.path == "local" else "remote"
                    self.num_delivered += 1
                    self.cached_tokens = 2
                    yield live

    def timings(self) -> dict[str, object]:
        return {"queue_s": 0.25, "recoveries": 0}

    def stop_choice(self, choice: int) -> None:
        self.stopped.append(choice)

    async def aclose(self) -> None:
        await asyncio.sleep(self.close_delay)
        self.closed.set()


@dataclass
class ScriptedGenerator:
    script: Script
    generations: list[ScriptedGeneration] = field(default_factory=list)
    close_delay: float = 0.0

    def generate(self, request: GenerationRequest) -> ScriptedGeneration:
        generation = ScriptedGeneration(request, self.script(request))
        generation.close_delay = self.close_delay
        self.generations.append(generation)
        return generation


@dataclass
class Gateway:
    """The server under test. say: events of one choice that spell a text, ended by the end token unless told so."""

    text: TextModel
    generator: ScriptedGenerator
    url: str
    http: ClientSession
    client: openai.AsyncOpenAI
    runner: web.AppRunner
    reason: str | None = None

    def say(
        self, text: str | bytes, choice: int = 0, finish: FinishReason | None = FinishReason.STOP
    ) -> list[TokenEvent]:
        data = text.encode() if isinstance(text, str) else text
        by_byte = {self.text.token_bytes(index): index for index in range(256)}
        tokens = [by_byte[bytes([byte])] for byte in data]
        if finish is FinishReason.STOP:
            tokens.append(257)
        return [
            TokenEvent(choice, index, token, self._logprob(token), finish if index == len(tokens) - 1 else None)
            for index, token in enumerate(tokens)
        ]

    def reply(self, text: str | bytes, *, finish: FinishReason | None = FinishReason.STOP) -> None:
        """Every choice says the same, one token of each in a batch."""

        def script(request: GenerationRequest) -> list[Step]:
            spoken = [self.say(text, choice, finish) for choice in range(request.sampling.n)]
            return [tuple(step) for step in zip(*spoken, strict=True)]

        self.generator.script = script

    @property
    def generation(self) -> ScriptedGeneration:
        return self.generator.generations[-1]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10.0):
            while not condition():
                await asyncio.sleep(0.001)

    async def metrics(self) -> str:
        async with self.http.get(f"{self.url}/metrics") as response:
            return await response.text()

    @staticmethod
    def _logprob(token: int) -> TokenLogprob:
        return TokenLogprob(logprob=-0.5, top=((token, -0.5), ((token + 1) % 256, -float("inf"))))

    async def post(self, path: str, **body: Any) -> tuple[int, Any, Any]:
        async with self.http.post(self.url + path, json=body) as response:
            return response.status, await response.json(), response.headers

    async def sse(self, path: str, **body: Any) -> tuple[Any, list[bytes]]:
        """Headers, and the data of each event."""
        async with self.http.post(self.url + path, json=body | {"stream": True}) as response:
            assert response.status == 200, await response.text()
            data = await response.read()
        events = data.split(b"\n\n")
        assert events.pop() == b""
        assert all(event.startswith(b"data: ") for event in events)
        return response.headers, [event.removeprefix(b"data: ") for event in events]


Start = Callable[..., Any]


@pytest.fixture
async def start(text_model: TextModel) -> AsyncIterator[Start]:
    """Starts gateways with limits of their own; ends them all."""
    opened: list[Gateway] = []

    async def start_gateway(
        keys: Keyring | None = None, guests: Guests | None = None, streams: Streams | None = None, **limits: Any
    ) -> Gateway:
        generator = ScriptedGenerator(script=lambda request: [])
        gateway: Gateway
        deps = GatewayDeps(
            generator=generator,
            text=text_model,
            model_names=(MODEL, "org/toy"),
            max_model_len=MAX_MODEL_LEN,
            registry=CollectorRegistry(),
            health=lambda: gateway.reason,
            cluster=lambda: {"workers": []},
            limits=HttpLimits(**limits),
            guests=guests or Guests(),
            keys=keys,
            streams=streams,
        )
        runner = create_runner(create_app(deps))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        gateway = Gateway(text_model, generator, url, ClientSession(), client, runner)
        gateway.reply("Hello, world")
        opened.append(gateway)
        return gateway

    yield start_gateway
    for gateway in opened:
        await gateway.client.close()
        await gateway.http.close()
        await gateway.runner.cleanup()


@pytest.fixture
async def gateway(start: Start) -> Any:
    return await start()
