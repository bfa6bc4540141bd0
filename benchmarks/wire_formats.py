"""What each wire format costs and what it saves: `make bench-wire-formats`.

The default model reads the golden prompts; their keys and values are encoded and decoded as on the way to another
worker, and the answers' 64 tokens are then fed back. Logits are compared with those behind keys and values that stayed
where they were. Agreement: the share of tokens at which the likeliest is the same. Rates are those of one core on a
block of 256 tokens. Break-even: the link rate below which a format ends sooner than raw bytes do.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from benchmarks.report import Machine, Row, figure, print_rows, write_rows
from shared.engine.models.base import Batch, Model
from shared.engine.models.registry import load_model
from shared.engine.weights.catalog import prepare
from shared.runtime.settings import DEFAULT_MODEL, GatewaySettings, load_settings
from shared.state.components import StateComponent
from shared.state.layout import PoolLayout
from shared.transfer.formats.base import WireFormat
from shared.transfer.formats.block import block_shape
from shared.transfer.formats.catalog import LOSSINESS, format_for
from shared.transfer.formats.choice import Option, break_even_bytes_per_s

GOLDEN = Path(__file__).parents[1] / "tests" / "data" / "golden" / "smollm2.json"
KV_DTYPES = ("float32", "float16")
_PAGE_TOKENS = 16
_BLOCK_TOKENS = 256
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: tuple[int, ...]
    answer: tuple[int, ...]


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    machine = Machine.here()
    prompts = golden_prompts(args.tokens)[: args.prompts]
    directory = prepare(DEFAULT_MODEL, load_settings(GatewaySettings).cache_dir).directory
    rows: list[Row] = []
    for dtype in args.kv:
        bench = Bench(load_model(directory, kv_dtype=dtype), prompts)
        exact = bench.answers()
        for name in LOSSINESS:
            rows += _compared(name, dtype, bench, exact, args.runs)
    print_rows(Console(highlight=False), f"Wire formats over {len(prompts)} prompts", rows, machine)
    if args.prompts is None:
        write_rows("wire_formats", rows, machine)


class Bench:
    """All prompts read into one pool, and that pool's bytes put back before each answer."""

    def __init__(self, model: Model, prompts: Sequence[Prompt]) -> None:
        self.model, self.prompts = model, prompts
        longest = max(len(p.tokens) + len(p.answer) for p in prompts)
        per_prompt = -(-longest // _PAGE_TOKENS)
        self.tables = torch.arange(len(prompts) * per_prompt, dtype=torch.int32).view(len(prompts), per_prompt)
        components = model.components(_PAGE_TOKENS)
        layout = PoolLayout(components, num_pages=self.tables.numel(), num_slots=1)
        pool = memoryview(bytearray(layout.total_bytes))
        views = [layout.view(pool, i) for i in range(len(components))]
        self.component, self.pool = components[0], views[0]
        self.state = tuple(torch.from_numpy(view) for view in views)
        for number, prompt in enumerate(prompts):
            self._forward([number], [list(prompt.tokens)], [0])
        self.read = self.pool.copy()

    def answers(self) -> torch.Tensor:
        """Logits [tokens, prompts, vocab] of each answer's tokens after the first, which the prefill worker samples."""
        numbers, logits = list(range(len(self.prompts))), []
        for k in range(len(self.prompts[0].answer) - 1):
            new = [[prompt.answer[k]] for prompt in self.prompts]
            logits.append(self._forward(numbers, new, [len(prompt.tokens) + k for prompt in self.prompts]))
        return torch.stack(logits)

    def hand_over(self, chosen: WireFormat) -> tuple[int, int]:
        """Every prompt's rows by way of that format; bytes on the wire, and of the rows."""
        wire_bytes = row_bytes = 0
        self.pool[...] = self.read
        for number, prompt in enumerate(self.prompts):
            for rows in blocks(self.read, self.component, self.tables[number].tolist(), len(prompt.tokens)):
                data = chosen.encode(rows.values, self.component)
                out = np.empty_like(rows.values)
                chosen.decode(data, self.component, out)
                self._put(rows, out)
                wire_bytes, row_bytes = wire_bytes + len(data), row_bytes + out.nbytes
        return wire_bytes, row_bytes

    def _put(self, rows: "Rows", values: np.ndarray) -> None:
        outer, inner = self.component.outer, self.component.inner
        count = values.shape[3]
        self.pool[:, rows.pages, ..., :count, :] = values.reshape(*values.shape[:2], *outer, count, *inner)

    def _forward(self, numbers: list[int], new: list[list[int]], first: list[int]) -> torch.Tensor:
        starts = np.cumsum([0, *map(len, new)])
        ends = [begin + len(tokens) for begin, tokens in zip(first, new, strict=True)]
        positions = [p for begin, end in zip(first, ends, strict=True) for p in range(begin, end)]
        batch = Batch(
            tokens=torch.tensor([token for tokens in new for token in tokens]),
            positions=torch.tensor(positions),
            query_start=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor(ends, dtype=torch.int32),
            block_tables=self.tables[numbers],
            slots=torch.zeros(len(numbers), dtype=torch.int32),
            logit_rows=torch.tensor(starts[1:] - 1, dtype=torch.int64),
        )
        return self.model.forward(batch, self.state)


@dataclass(frozen=True, slots=True)
class Rows:
    pages: list[int]
    values: np.ndarray


def blocks(pool: np.ndarray, component: StateComponent, pages: list[int], num_tokens: int) -> list[Rows]:
    """A prompt's rows as blocks of whole pages, and one of the rows of the last page if that is not full."""
    found = []
    whole, rest = divmod(num_tokens, _PAGE_TOKENS)
    step = _BLOCK_TOKENS // _PAGE_TOKENS
    cuts = [(pages[at : min(at + step, whole)], _PAGE_TOKENS) for at in range(0, whole, step)]
    for some, count in [*cuts, *([([pages[whole]], rest)] if rest else [])]:
        shape = block_shape(component, component.num_layers, len(some), count)
        found.append(Rows(some, np.ascontiguousarray(pool[:, some, ..., :count, :]).reshape(shape)))
    return found


def golden_prompts(num_tokens: int) -> list[Prompt]:
    golden: dict[str, Any] = json.loads(GOLDEN.read_text())
    cases = [*golden["chat"], *golden["text"]]
    return [Prompt(tuple(c["prompt_ids"]), tuple(c.get("forced_ids", c["output_ids"]))[:num_tokens]) for c in cases]


def _compared(name: str, dtype: str, bench: Bench, exact: torch.Tensor, runs: int) -> list[Row]:
    chosen = format_for(name, bench.component)
    if chosen.name != name:
        return []
    label = f"{name}-{dtype}"
    wire_bytes, row_bytes = bench.hand_over(chosen)
    logits = bench.answers()
    goal = 1.0 if name == "lossless" else None
    agreement = (logits.argmax(dim=-1) == exact.argmax(dim=-1)).float().mean()
    encode_s, decode_s, block_bytes = _measured(chosen, bench, runs)
    rates = [block_bytes / min(spent) for spent in (encode_s, decode_s)]
    option = Option(name, wire_bytes, *(row_bytes / rate for rate in rates))
    return [
        figure(f"wire-bytes-{label}", "%", [100 * wire_bytes / row_bytes]),
        figure(f"logit-error-max-{label}", "", [float((logits - exact).abs().max())], against=0.0, goal=goal),
        figure(f"agreement-{label}", "%", [100 * float(agreement)], less_is_better=False, against=100.0, goal=goal),
        figure(f"encode-{label}", "MiB/s", [block_bytes / s / _MIB for s in encode_s], less_is_better=False),
        figure(f"decode-{label}", "MiB/s", [block_bytes / s / _MIB for s in decode_s], less_is_better=False),
        figure(f"break-even-{label}", "Mbit/s", [8e-6 * break_even_bytes_per_s(option, row_bytes)]),
    ]


def _measured(chosen: WireFormat, bench: Bench, runs: int) -> tuple[list[float], list[float], int]:
    """Seconds to encode and to decode the longest prompt's first block, and its bytes."""
    number = max(range(len(bench.prompts)), key=lambda k: len(bench.prompts[k].tokens))
    pages, num_tokens = bench.tables[number].tolist(), len(bench.prompts[number].tokens)
    values = blocks(bench.read, bench.component, pages, num_tokens)[0].values
    out, encoded, decoded = np.empty_like(values), [], []
    for _ in range(runs):
        begin = time.perf_counter()
        data = chosen.encode(values, bench.component)
        middle = time.perf_counter()
        chosen.decode(data, bench.component, out)
        encoded.append(middle - begin)
        decoded.append(time.perf_counter() - middle)
    return encoded, decoded, values.nbytes


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-wire-formats", description=__doc__)
    parser.add_argument("--prompts", type=int, help="only so many of the prompts; nothing is written then")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--kv", nargs="+", choices=KV_DTYPES, default=KV_DTYPES, help="what the pool holds")
    parser.add_argument("--runs", type=int, default=9, help="for the rates")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
