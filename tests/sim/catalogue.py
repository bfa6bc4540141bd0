"""The requests that simulated clients send, and the right answer to each, computed by one quiet engine alone.

There are so many kinds of request, drawn once and for all; a seed picks from them, so that an answer is computed once a
process.

Kinds with a *common* beginning are answered by a model that keeps all of its state by position: what one of them has
computed is of use to the others.
"""

import asyncio
import random
from dataclasses import dataclass
from functools import lru_cache

from shared.engine.api import StepOutput, TokenOut
from shared.engine.engine import BatchEngine
from shared.engine.executor import InlineExecutor
from shared.engine.models.toy import VOCAB_SIZE, Toy
from shared.engine.pool import StatePool
from shared.engine.settings import EngineSettings, plan_layout
from shared.protocol.messages import FinishReason, SamplingSpec, TokenLogprob
from shared.transfer.link import TicketKey
from tests.sim.virtual_time import run_virtual

NUM_KINDS = 256
_LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 23, 24, 25, 31, 33)
_MAX_TOKENS = (1, 1, 2, 3, 4, 5, 6, 8, 8, 10, 12, 16, 32)


@dataclass(frozen=True, slots=True)
class Right:
    """The whole of one choice."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...]
    finish: FinishReason


@dataclass(frozen=True, slots=True)
class Kind:
    prompt: tuple[int, ...]
    sampling: SamplingSpec
    answer: tuple[Right, ...]

    def pages(self, page_tokens: int) -> int:
        """At least what one worker needs to end it."""
        n, prompt, tokens = self.sampling.n, len(self.prompt), self.sampling.max_tokens
        return prompt // page_tokens + n * (-(-(prompt % page_tokens + tokens) // page_tokens) + 1)


@lru_cache(maxsize=2 * NUM_KINDS)
def kind(number: int, common: bool = False) -> Kind:
    """Must not be called inside a running loop."""
    rng = random.Random(number)
    prompt = tuple(rng.randrange(VOCAB_SIZE - 1) for _ in range(rng.choice(_LENGTHS)))
    sampling = _sampling(rng, prompt)
    if common:
        theirs = random.Random(number % 3)
        prompt = (*(theirs.randrange(VOCAB_SIZE - 1) for _ in range(rng.choice((0, 16, 19, 24)))), *prompt)[:36]
    model = Toy(by_position=common)
    answer = _compute(model, prompt, sampling)
    if rng.random() < 0.2:  # a stop token that does come
        stop = rng.choice(answer[0].tokens)
        sampling = sampling.model_copy(update={"stop_token_ids": (stop,)})
        answer = _compute(model, prompt, sampling)
    return Kind(prompt, sampling, answer)


def _sampling(rng: random.Random, prompt: tuple[int, ...]) -> SamplingSpec:
    greedy = rng.random() < 0.5
    spec: dict[str, object] = {
        "seed": rng.getrandbits(40),
        "n": rng.choice((1, 1, 1, 1, 2, 3)),
        "max_tokens": rng.choice(_MAX_TOKENS),
        "temperature": 0.0 if greedy else rng.choice((0.6, 0.9, 1.3)),
        "ignore_eos": rng.random() < 0.9,
        "logprobs": rng.choice((None, None, 0, 2)),
    }
    if rng.random() < 0.3:
        spec |= {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
    if rng.random() < 0.2:
        spec |= {"top_k": 40, "top_p": 0.9}
    if rng.random() < 0.1:
        spec |= {"logit_bias": ((prompt[0], -5.0), (rng.randrange(200), 3.0))}
    return SamplingSpec(**spec)


def _compute(model: Toy, prompt: tuple[int, ...], sampling: SamplingSpec) -> tuple[Right, ...]:
    tokens = run_virtual(_alone(model, prompt, sampling))
    choices = [[out for out in tokens if out.choice == c] for c in range(sampling.n)]
    return tuple(
        Right(tuple(o.token for o in outs), tuple(o.logprob for o in outs), FinishReason(str(outs[-1].finish)))
        for outs in choices
    )


async def _alone(model: Toy, prompt: tuple[int, ...], sampling: SamplingSpec) -> list[TokenOut]:
    tokens: list[TokenOut] = []
    done = asyncio.Event()

    def listen(output: StepOutput) -> None:
        assert not output.failed
        assert not output.preempted
        tokens.extend(output.tokens)
        if sum(out.finish is not None for out in tokens) == sampling.n:
            done.set()

    settings = EngineSettings(page_tokens=4, num_pages=256, max_running=8, prefill_chunk=8, max_step_tokens=64)
    key = TicketKey(1, 1)
    pool = StatePool(plan_layout(model, settings))
    engine = BatchEngine(model, pool, settings, InlineExecutor(), listen)
    running = asyncio.get_running_loop().create_task(engine.run())
    engine.reserve(key, prompt, sampling, decodes=True)
    engine.start_local(key)
    await done.wait()
    await engine.retire(key)
    await engine.close()
    await running
    pool.close()
    return tokens
