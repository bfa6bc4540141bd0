"""A recorded load, scaled to the machine it is replayed on: JSONL in the form of Mooncake's traces.

A line has `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one for every 512 tokens of the prompt:
equal ids mean equal text. A block becomes `block_tokens` tokens, made from its id alone, so that prompts share what
they shared.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from services.bench.errors import BenchError
from services.bench.plan.prompts import WORDS, Measure
from services.bench.plan.workload import PlannedRequest

TRACE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceLine:
    at_s: float
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TraceScale:
    """time: seconds of ours for a second of the trace; rate: requests a second on average instead. max_context:
    requests that are longer, scaled, are left out."""

    block_tokens: int = 16
    time: float = 1.0
    rate: float | None = None
    max_context: int | None = None

    def input_len(self, line: TraceLine) -> int:
        return self._tokens(line.input_len)

    def output_len(self, line: TraceLine) -> int:
        return self._tokens(line.output_len)

    def fits(self, line: TraceLine) -> bool:
        return self.max_context is None or self.input_len(line) + self.output_len(line) <= self.max_context

    def _tokens(self, length: int) -> int:
        return max(1, round(length * self.block_tokens / TRACE_BLOCK_TOKENS))


def read_trace(path: Path) -> list[TraceLine]:
    """In order of time, the first at 0. BenchError names the line that is none."""
    lines: list[TraceLine] = []
    try:
        with path.open(encoding="utf-8") as file:
            lines = [
                _line(text, f"--trace {path}, line {number}") for number, text in enumerate(file, 1) if text.strip()
            ]
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"--trace {path}: {getattr(error, 'strerror', None) or 'not text'}") from error
    if not lines:
        raise BenchError(f"--trace {path} is empty")
    lines.sort(key=lambda line: line.at_s)
    first_s = lines[0].at_s
    return _spread([replace(line, at_s=line.at_s - first_s) for line in lines])


class TraceWorkload:
    """All requests are made when it is, so that a run spends nothing on them. It ends after num_requests, or before the
    first arrival beyond duration_s, whichever comes first. left_out: too long for max_context."""

    def __init__(
        self,
        trace: Sequence[TraceLine],
        scale: TraceScale,
        measure: Measure,
        seed: int,
        num_requests: int | None = None,
        duration_s: float | None = None,
    ) -> None:
        blocks, factor = (
            _Blocks(seed, measure, scale.block_tokens),
            _time_factor([line for line in trace if scale.fits(line)], scale),
        )
        planned: list[PlannedRequest] = []
        self.left_out = 0
        for line in trace:
            at_s = line.at_s * factor
            if len(planned) == num_requests or (duration_s is not None and at_s > duration_s):
                break
            if not scale.fits(line):
                self.left_out += 1
                continue
            prompt = blocks.prompt(line.hash_ids, scale.input_len(line))
            planned.append(PlannedRequest(len(planned), at_s, prompt, scale.output_len(line)))
        if not planned:
            raise BenchError(f"no request of the trace is left: {self.left_out} are longer than --max-context")
        self._planned = planned
        self.num_requests: int | None = len(planned)
        self.duration_s: float | None = planned[-1].at_s

    def __iter__(self) -> Iterator[PlannedRequest]:
        return iter(self._planned)


class _Blocks:
    """The text of each block, which only its id and the seed decide."""

    def __init__(self, seed: int, measure: Measure, block_tokens: int) -> None:
        self._seed = seed
        self._words_per_token = 1.0 / measure.slope
        self._num_words = max(1, round(block_tokens * self._words_per_token))
        self._known: dict[int, list[str]] = {}

    def prompt(self, hash_ids: Sequence[int], tokens: int) -> str:
        """The blocks in order, the last one cut. What the server adds of its own comes on top."""
        words = [word for hash_id in hash_ids for word in self._block(hash_id)]
        return " ".join(words[: max(1, round(tokens * self._words_per_token))])

    def _block(self, hash_id: int) -> list[str]:
        found = self._known.get(hash_id)
        if found is None:
            rng = random.Random(f"{self._seed}:block:{hash_id}")
            found = self._known[hash_id] = rng.choices(WORDS, k=self._num_words)
        return found


def _time_factor(trace: Sequence[TraceLine], scale: TraceScale) -> float:
    if scale.rate is None:
        return scale.time
    length_s = trace[-1].at_s - trace[0].at_s if trace else 0.0
    return (len(trace) - 1) / (scale.rate * length_s) if length_s > 0 else 1.0


def _spread(lines: Sequence[TraceLine]) -> list[TraceLine]:
    """Requests with one timestamp are spread over the time to the next: a trace's clock ticks every few seconds, and
    its users did not arrive by ticks. Those of the last one take the step before it."""
    ticks = [(at_s, list(group)) for at_s, group in groupby(lines, key=lambda line: line.at_s)]
    spread: list[TraceLine] = []
    step_s = 0.0
    for index, (at_s, group) in enumerate(ticks):
        if index + 1 < len(ticks):
            step_s = ticks[index + 1][0] - at_s
        spread += [replace(line, at_s=at_s + step_s * k / len(group)) for k, line in enumerate(group)]
    return spread


def _line(text: str, where: str) -> TraceLine:
    try:
        said: Any = json.loads(text)
        input_len, output_len, hash_ids = int(said["input_length"]), int(said["output_length"]), said["hash_ids"]
        line = TraceLine(float(said["timestamp"]) / 1000, input_len, output_len, tuple(int(each) for each in hash_ids))
    except (ValueError, TypeError, LookupError) as error:
        raise BenchError(
            f"{where}: needs timestamp (ms), input_length, output_length and hash_ids, as in Mooncake's traces"
        ) from error
    if line.input_len < 1 or line.output_len < 1 or len(line.hash_ids) * TRACE_BLOCK_TOKENS < line.input_len:
        raise BenchError(f"{where}: needs lengths of at least 1, and a hash id for every {TRACE_BLOCK_TOKENS} tokens")
    return line
