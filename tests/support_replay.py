"""Whether an answer is what the model says: each token judged by one undisturbed forward pass over what precedes it.

An answer equals its solo run if and only if every one of its tokens is the solo run's choice after the tokens before
it, so one pass with the answer's own tokens forced says as much as running it again, and goes on behind a token that
rounding has changed. Rounding differs with the batch; so a token that is not the pass's own choice is *excused* where
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


def solo_logits(prompt: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
    """Float64 logits [len(tokens), vocab]: row i is what token i was chosen from."""
    fed = [*prompt, *tokens[:-1]]
    rows = list(range(len(prompt) - 1, len(fed)))
    sequence = PagedSequences(real_model(), 1, len(fed))
    with torch.inference_mode():
        return sequence.step({0: fed}, rows=rows).double().numpy()


def judge(asked: Asked, seen: ChoiceSeen, choice: int, *, whole: bool = True) -> int:
    """AssertionError where `seen` cannot be this choice of a solo run; else how many of its tokens are excused. whole:
    the answer came to its end; else only what came of it is judged."""
    if whole:
        _check_end(asked, seen)
    if not seen.token_ids:
        return 0
    logits = solo_logits(asked.prompt, seen.token_ids)
    excused = 0
    for index, token in enumerate(seen.token_ids):
        pick = _greedy if asked.temperature == 0 else _sampled
        if not pick(logits[index], token, asked, choice, index):
            excused += 1
    for index, logprob in enumerate(seen.logprobs):
        row = logits[index]
        expected = row[seen.token_ids[index]] - (row.max() + math.log(np.exp(row - row.max()).sum()))
        assert abs(logprob - expected) < 2 * LOGIT_ROUNDING, f"logprob {logprob} of token {index}, solo {expected}"
    return excused


def _greedy(logits: np.ndarray, token: int, asked: Asked, choice: int, index: int) -> bool:
    """True for the best token, False for one as good as that; AssertionError for another."""
    best = int(logits.argmax())
    behind = float(logits[best] - logits[token])
    assert token == best or behind < GREEDY_MARGIN, f"{asked}: token {index} is {token}, {behind} behind {best}"
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
