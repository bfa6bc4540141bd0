"""From logits to tokens, with the semantics of vLLM and Hugging Face.

Order: log probabilities from the raw logits; logit bias; `min_tokens` mask; repetition penalty (prompt and output);
frequency and presence penalty (output); temperature; top-k; top-p; min-p; one uniform keyed by (seed, choice,
position); inverse CDF in token order. Ties go to the lower token id everywhere, so top_k = 1 is the same as greedy.
Rows that need no more than a temperature go through one compiled pass; it gives the bits that the way of the others
would. A row's token depends on that row alone.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.cpu.sampling import pick, uniform
from shared.protocol.messages import SamplingSpec, TokenLogprob
from shared.runtime.errors import EngineError

GREEDY_BELOW = 1e-5
"""A temperature lower than this is 0: dividing by it would only overflow."""

_FIRST_LOOKS = (512, 4096)


@dataclass(frozen=True, slots=True)
class SampleRow:
    """position: where the sampled token will stand. output_ids: what this choice generated so far."""

    sampling: SamplingSpec
    choice: int
    position: int
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Sampled:
    token: int
    logprob: TokenLogprob | None


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
    """One token for each row of float32 logits [R, V], which are left as they are. Raises EngineError, having sampled
    nothing, where a row is not finite or no token is allowed; rows sampled one by one lose that row only."""
    if logits.shape[0] != len(rows):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} rows to sample")
    if not rows:
        return []
    logits = logits.detach().to(device="cpu", dtype=torch.float32)
    own_way = [_truncates(row.sampling) or _changes_logits(row.sampling) for row in rows]
    draws = _draws(rows)
    temperatures = [0.0 if own else row.sampling.temperature for own, row in zip(own_way, rows, strict=True)]
    with np.errstate(over="ignore"):
        scales = np.array([t if t >= GREEDY_BELOW else 0.0 for t in temperatures]).astype(np.float32)
    tokens = pick(logits, scales, draws).tolist()
    if min(tokens) < 0:
        broken = [str(i) for i, token in enumerate(tokens) if token < 0]
        raise EngineError(f"logits are not finite in row {', '.join(broken)} of {len(rows)}")
    results = []
    for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        count, chosen = row.sampling.logprobs, token
        if own_way[i] and (chosen := _choose(logits[i].numpy(), row, float(draws[i]))) < 0:
            raise EngineError(f"no token is allowed in row {i} of {len(rows)}")
        results.append(Sampled(chosen, None if count is None else _logprob(logits[i].numpy(), chosen, count)))
    return results


def _draws(rows: Sequence[SampleRow]) -> np.ndarray:
    return uniform(
        np.array([row.sampling.seed for row in rows], dtype=np.uint64),
        np.array([row.choice for row in rows], dtype=np.uint64),
        np.array([row.position for row in rows], dtype=np.uint64),
    )


def _truncates(spec: SamplingSpec) -> bool:
    return spec.temperature >= GREEDY_BELOW and (spec.top_k > 0 or spec.top_p < 1.0 or spec.min_p > 0.0)


def _changes_logits(spec: SamplingSpec) -> bool:
    return bool(
        spec.logit_bias
        or spec.min_tokens
        or spec.repetition_penalty != 1.0
        or spec.frequency_penalty
        or spec.presence_penalty
    )


def _choose(raw: np.ndarray, row: SampleRow, draw: float) -> int:
    """The token of one row, or -1 where every token is forbidden."""
    spec = row.sampling
    values = _adjusted(raw, row) if _changes_logits(spec) else raw
    best = int(values.argmax())
    if values[best] == -np.inf:
        return -1
    if spec.temperature < GREEDY_BELOW:
        return best
    with np.errstate(over="ignore"):
        weights = np.exp((values - values[best]) / np.float32(spec.temperature))
    kept = _kept(weights, spec)
    if kept is not None:
        weights = weights[kept]
    cumulative = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(cumulative, draw * cumulative[-1], side="right"))
    if index == len(weights):  # the product rounded up to the total
        index = int(np.flatnonzero(weights)[-1])
    return index if kept is None else int(kept[index])


def _adjusted(raw: np.ndarray, row: SampleRow) -> np.ndarray:
    """A copy of the logits with bias, mask and penalties. Ids outside the vocabulary name no token and do nothing."""
    spec, vocab_size = row.sampling, len(raw)
    values = raw.copy()
    for token, bias in spec.logit_bias:
        if 0 <= token < vocab_size:
            values[token] += np.float32(bias)
    if len(row.output_ids) < spec.min_tokens:
        values[_ids((*row.eos_token_ids, *spec.stop_token_ids), vocab_size)] = -np.inf
    if spec.repetition_penalty != 1.0:
        seen = np.concatenate((_ids(row.prompt_ids, vocab_size), _ids(row.output_ids, vocab_size)))
        before, penalty = values[seen], np.float32(spec.repetition_penalty)
        values[seen] = np.where(before > 0, before / penalty, before * penalty)
    if row.output_ids and (spec.frequency_penalty or spec.presence_penalty):
        tokens, counts = np.unique(_ids(row.output_ids, vocab_size), return_counts=True)
        values[tokens] -= (spec.frequency_penalty * counts + spec.presence_penalty).astype(np.float32)
    return values


def _ids(tokens: Iterable[int], vocab_size: int) -> np.ndarray:
    ids = np.fromiter(tokens, dtype=np.int64)
    return ids[(ids >= 0) & (ids < vocab_size)]


def _kept(weights: np.ndarray, spec: SamplingSpec) -> np.ndarray | None:
    """Token ids, ascending, that top-k, top-p and min-p leave; None for all. weights: exp(logit - max)."""
    kept: np.ndarray | None = None
    if 0 < spec.top_k < len(weights):
        kept = _highest(weights, spec.top_k)
    if spec.top_p < 1.0:
        candidates = weights if kept is None else weights[kept]
        best = _highest(candidates, _nucleus_size(candidates, spec.top_p))
        kept = best if kept is None else kept[best]
    if spec.min_p > 0.0:
        candidates = weights if kept is None else weights[kept]
        likely = np.flatnonzero(candidates >= spec.min_p * float(candidates.max()))
        kept = likely if kept is None else kept[likely]
    return kept


def _nucleus_size(weights: np.ndarray, top_p: float) -> int:
    """How many of the heaviest are needed to hold `top_p` of the total: those before which less than that is held."""
    wanted = top_p * float(weights.sum(dtype=np.float64))
    size = len(weights)
    for look in (min(n, size) for n in (*_FIRST_LOOKS, size)):  # sorting the vocabulary is rarely needed
        heaviest = np.sort(np.partition(weights, size - look)[size - look :])[::-1]
        held = np.cumsum(heaviest, dtype=np.float64)
        if held[-1] >= wanted:
            break
    return min(int(np.searchsorted(held, wanted, side="left")) + 1, size)


def _highest(weights: np.ndarray, count: int) -> np.ndarray:
    """Indices, ascending, of the `count` highest; of equals the lower index."""
    if count >= len(weights):
        return np.arange(len(weights))
    least = np.partition(weights, len(weights) - count)[len(weights) - count]
    above = np.flatnonzero(weights > least)
    level = np.flatnonzero(weights == least)[: count - len(above)]
    return np.sort(np.concatenate((above, level)))


def _logprob(raw: np.ndarray, token: int, count: int) -> TokenLogprob:
    """Log softmax of the token, and of the `count` best, best first."""
    highest = float(raw.max())
    total = float(np.exp(raw - np.float32(highest)).sum(dtype=np.float64))
    shift = highest + math.log(total)
    if not count:
        return TokenLogprob(logprob=float(raw[token]) - shift)
    best = _highest(raw, count)
    best = best[np.argsort(-raw[best], kind="stable")]
    return TokenLogprob(logprob=float(raw[token]) - shift, top=tuple((int(i), float(raw[i]) - shift) for i in best))
