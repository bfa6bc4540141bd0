"""Requests that are cut off after some of their tokens and go on on another engine, for the tests that this changes
nothing."""

import random
from dataclasses import dataclass
from typing import Any

from shared.engine.api import Past, TokenOut
from shared.protocol.messages import FinishReason, FirstToken, SamplingSpec, TokenLogprob
from shared.transfer.link import TicketKey
from tests.support_engine import EngineBench, deliver, first_tokens

Seen = tuple[int, int, TokenLogprob | None, FinishReason | None]
"""A token as it was given out: index, id, log probabilities, and whether it was the last."""


@dataclass(frozen=True)
class Cut:
    """whole: all that each choice gives out when nobody interrupts it. at: how many of these are given out already.
    stopped: choices that the client's text has ended there."""

    prompt: tuple[int, ...]
    sampling: SamplingSpec
    whole: tuple[tuple[Seen, ...], ...]
    at: tuple[int, ...]
    stopped: frozenset[int] = frozenset()

    @property
    def finished(self) -> tuple[int, ...]:
        return tuple(c for c, seen in enumerate(self.whole) if self.at[c] == len(seen) or c in self.stopped)

    @property
    def past(self) -> Past:
        outputs = (tuple(token for _, token, *_ in seen[:k]) for seen, k in zip(self.whole, self.at, strict=True))
        return Past(tuple(outputs), self.finished)

    @property
    def live(self) -> list[int]:
        return [c for c in range(len(self.whole)) if c not in self.finished]

    @property
    def rest(self) -> list[list[Seen]]:
        """What is still to come, by choice."""
        return [
            list(seen[k:]) if c in self.live else []
            for c, (seen, k) in enumerate(zip(self.whole, self.at, strict=True))
        ]


def cut_somewhere(prompt: tuple[int, ...], sampling: SamplingSpec, whole: list[list[Seen]], rng: random.Random) -> Cut:
    """Each choice at a place of its own, or at its end; some ended by the client. At least one has to go on."""
    at = [rng.randint(0, len(seen)) for seen in whole]
    stopped = {c for c in range(len(whole)) if rng.random() < 0.2}
    if all(c in stopped or k == len(whole[c]) for c, k in enumerate(at)):
        last = rng.randrange(len(whole))
        at[last] = rng.randrange(len(whole[last]))
        stopped.discard(last)
    return Cut(prompt, sampling, tuple(map(tuple, whole)), tuple(at), frozenset(stopped))


def some_sampling(rng: random.Random, vocab_size: int, **fixed: Any) -> SamplingSpec:
    """Anything that a client may ask for, in any mix."""
    ids = range(vocab_size)
    spec: dict[str, Any] = {
        "seed": rng.getrandbits(64),
        "n": rng.choice((1, 1, 2, 3, 4)),
        "max_tokens": rng.randint(1, 24),
        "min_tokens": rng.choice((0, 0, 4, 9)),
        "temperature": rng.choice((0.0, 0.7, 1.3)),
        "top_k": rng.choice((0, 0, 12)),
        "top_p": rng.choice((1.0, 0.8)),
        "min_p": rng.choice((0.0, 0.0, 0.1)),
        "presence_penalty": rng.choice((0.0, 0.0, 0.7)),
        "frequency_penalty": rng.choice((0.0, 0.0, 1.1)),
        "repetition_penalty": rng.choice((1.0, 1.0, 1.4)),
        "logit_bias": tuple((token, rng.choice((-100.0, 2.0))) for token in rng.sample(ids, rng.choice((0, 0, 20)))),
        "stop_token_ids": tuple(rng.sample(ids, rng.choice((0, 0, vocab_size // 12)))),
        "ignore_eos": rng.random() < 0.5,
        "logprobs": rng.choice((None, 0, 3)),
    }
    return SamplingSpec(**(spec | fixed))


def seen(out: TokenOut) -> Seen:
    return out.index, out.token, out.logprob, out.finish


def given_out(bench: EngineBench, key: TicketKey, choices: int) -> list[list[Seen]]:
    return [[seen(out) for out in bench.tokens if (out.key, out.choice) == (key, c)] for c in range(choices)]


async def uninterrupted(
    bench: EngineBench, key: TicketKey, prompt: tuple[int, ...], sampling: SamplingSpec
) -> list[list[Seen]]:
    await bench.local(key, prompt, sampling)
    return given_out(bench, key, sampling.n)


async def go_on_local(bench: EngineBench, key: TicketKey, cut: Cut) -> list[list[Seen]]:
    """All that this engine gives out when it computes prompt and past itself."""
    bench.engine.reserve(key, cut.prompt, cut.sampling, decodes=True, past=cut.past)
    bench.engine.start_local(key)
    await bench.finish(key, len(cut.live))
    await bench.engine.retire(key)
    return given_out(bench, key, cut.sampling.n)


async def hand_over(p: EngineBench, d: EngineBench, key: TicketKey, cut: Cut) -> tuple[FirstToken, ...]:
    """Reserves on D, computes on P, and puts the state into D's pool. P's handoff tokens."""
    d.engine.reserve(key, cut.prompt, cut.sampling, decodes=True, past=cut.past)
    chunks = await p.prefill(key, cut.past.trunk(cut.prompt), cut.sampling)
    deliver(p, d, key, chunks)
    await p.engine.retire(key)
    return first_tokens(chunks)


async def go_on_prefilled(p: EngineBench, d: EngineBench, key: TicketKey, cut: Cut) -> list[list[Seen]]:
    """All that D gives out, and before it P's tokens for the choices that had none."""
    first = await hand_over(p, d, key, cut)
    d.engine.start_prefilled(key, first)
    taken = [one for one in first if one.choice in cut.live and not cut.at[one.choice]]
    await d.finish(key, len(cut.live) - sum(one.finish is not None for one in taken))
    await d.engine.retire(key)
    given = given_out(d, key, cut.sampling.n)
    for one in taken:
        given[one.choice].insert(0, (0, one.token, one.logprob, one.finish))
    return given
