"""Whether an answer is what the model says: each token judged by one undisturbed forward pass over what precedes it.

An answer equals its solo run if and only if each of its tokens is the solo run's choice after the tokens before it; so
one pass with the answer's own tokens forced says as much as running it again, and goes on behind a token that rounding
has changed. Rounding differs with the batch; so a token that is not the pass's own choice is *excused* where
the choice was a draw within rounding, and wrong otherwise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shared.engine.philox import uniform
from tests.support_answers import ChoiceSeen
from tests.support_model import PagedSequences, real_model
from tests.support_text import text_model

GREEDY_MARGIN = 0.001
"""Between the logits of the two best tokens."""
LOGIT_ROUNDING = 5e-4
EOS = 2


@dataclass(frozen=True)
class Asked:
    """What matters of a request for the choice of tokens and the end."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    stop: str | None = None
    ignore_eos: bool = False


@dataclass(frozen=True)
class Given:
    """One choice as a client saw it. whole: it came to its end; else only what came of it is judged."""

    asked: Asked
    seen: ChoiceSeen
    choice: int = 0
    whole: bool = True


def solo_logits(prompt: tuple[int, ...], answers: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Per answer, float64 logits [its length, vocab]: row i is what its token i is chosen from. The prompt is computed
    once and alone, the answers behind copies of it."""
    sequences = PagedSequences(real_model(weights=None), len(answers), len(prompt) + max(map(len, answers)))
    with torch.inference_mode():
        first = sequences.step({0: list(prompt)}).double().numpy()
        sequences.fork(0)
        forced = {i: list(answer[:-1]) for i, answer in enumerate(answers) if len(answer) > 1}
        rest = sequences.step(forced, every_row=True).double().numpy() if forced else first[:0]
    ends = np.cumsum([len(answer) - 1 for answer in answers])
    parts = [rest[end - len(answer) + 1 : end] for end, answer in zip(ends, answers, strict=True)]
    return [np.concatenate((first, part)) for part in parts]


def judge(prompt: tuple[int, ...], given: Sequence[Given]) -> int:
    """AssertionError where one of the answers to `prompt` cannot be that of a solo run; else how many of their tokens
    are excused."""
    for answer in given:
        if answer.whole:
            _check_end(answer.asked, answer.seen)
    begun = [answer for answer in given if answer.seen.token_ids]
    if not begun:
        return 0
    logits = solo_logits(prompt, [answer.seen.token_ids for answer in begun])
    return sum(_excused(answer, rows) for answer, rows in zip(begun, logits, strict=True))


def _excused(given: Given, logits: np.ndarray) -> int:
    tokens, pick = given.seen.token_ids, _greedy if given.asked.temperature == 0 else _sampled
    for row, token, logprob in zip(logits, tokens, given.seen.logprobs, strict=False):
        expected = row[token] - (row.max() + math.log(np.exp(row - row.max()).sum()))
        assert abs(logprob - expected) < 2 * LOGIT_ROUNDING, f"{given}: {logprob} for {token}, solo {expected}"
    picks = [
        pick(row, token, given.asked, given.choice, i)
        for i, (row, token) in enumerate(zip(logits, tokens, strict=True))
    ]
    return picks.count(False)


def _greedy(logits: np.ndarray, token: int, asked: Asked, choice: int, index: int) -> bool:
    """True for the best token, False for one as good as that; AssertionError for another."""
    best = int(logits.argmax())
    behind = float(logits[best] - logits[token])
    assert token == best or behind < GREEDY_MARGIN, f"{asked}: token {index} is {token}, {behind} behind {best}"
    if token != best:
        print(f"excused: {token}, {behind:.2g} behind {best}")
    return token == best


def _sampled(logits: np.ndarray, token: int, asked: Asked, choice: int, index: int) -> bool:
    """True where the draw falls into the token's interval, False where it is as near as rounding; else
    AssertionError. If each logit is off by at most e, a border at F is off by at most F (1 - F) (exp(2 e / T) - 1)."""
    weights = np.exp((logits - logits.max()) / asked.temperature)
    borders = np.concatenate(([0.0], np.cumsum(weights) / weights.sum()))
    draw = float(
        uniform(np.array([asked.seed], dtype=np.uint64), np.array([choice]), np.array([len(asked.prompt) + index]))[0]
    )
    low, high = float(borders[token]), float(borders[token + 1])
    if low <= draw < high:
        return True
    border = low if draw < low else high
    off, allowed = abs(draw - border), border * (1 - border) * math.expm1(2 * LOGIT_ROUNDING / asked.temperature)
    assert off <= allowed, f"{asked}: choice {choice}, token {index} is {token} [{low}, {high}), the draw is {draw}"
    print(f"excused: the draw is {off:.2g} outside the token's interval, of {allowed:.2g} allowed")
    return False


def _check_end(asked: Asked, seen: ChoiceSeen) -> None:
    """Text and finish reason follow from the tokens."""
    tokens = seen.token_ids
    assert tokens, seen
    ended = tokens[-1] == EOS and not asked.ignore_eos
    assert asked.ignore_eos or EOS not in tokens[:-1], seen
    shown = text_model().decode(tokens[:-1] if ended else tokens, skip_special=True)
    stopped = asked.stop is not None and asked.stop in shown
    if asked.stop is not None and stopped:
        before = text_model().decode(tokens[:-1], skip_special=True)
        assert asked.stop not in before, f"tokens behind the stop string: {seen}"
        shown = shown[: shown.index(asked.stop)]
    assert seen.text == shown, seen
    assert seen.finish == ("stop" if ended or stopped else "length"), seen
    assert len(tokens) <= asked.max_tokens, seen
    assert ended or stopped or len(tokens) == asked.max_tokens, seen
