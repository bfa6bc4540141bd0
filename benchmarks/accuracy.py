"""What each format of weights, and of keys and values, costs in accuracy: `make bench-accuracy`.

The default model reads a fixed public-domain text in one piece. Its logits are compared with those of float32 weights
and state, and the text's perplexity is measured. Agreement: the share of positions at which the likeliest next token is
the same.
"""

from pathlib import Path

import torch
from rich.console import Console

from benchmarks.report import Machine, Row, figure, print_rows, write_rows
from kernels.cpu.ops import KV_TYPES
from kernels.packing import FORMATS
from shared.engine.models.base import Batch, Model
from shared.engine.models.registry import load_model
from shared.engine.weights.catalog import prepare
from shared.runtime.settings import DEFAULT_MODEL, GatewaySettings, load_settings
from shared.state.layout import PoolLayout
from shared.text.tokenizer import TextModel

TEXT = Path(__file__).parent / "texts" / "public_domain.txt"
_PAGE_TOKENS = 16


def main() -> None:
    machine = Machine.here()
    prepared = prepare(DEFAULT_MODEL, load_settings(GatewaySettings).cache_dir)
    tokens = TextModel.load(prepared.directory).encode(TEXT.read_text(encoding="utf-8"), add_special=True)
    exact = read(load_model(prepared.directory), tokens)
    rows = [figure("perplexity-float32", "", [perplexity(exact, tokens)])]
    for name in FORMATS:
        rows += compare(name, read(load_model(prepared.directory, weights=name), tokens), exact, tokens)
    for name in KV_TYPES:
        if name != "float32":
            rows += compare(f"kv-{name}", read(load_model(prepared.directory, kv_dtype=name), tokens), exact, tokens)
    print_rows(Console(highlight=False), f"Accuracy of formats over {len(tokens)} tokens", rows, machine)
    write_rows("accuracy", rows, machine)


def read(model: Model, tokens: list[int]) -> torch.Tensor:
    """Logits after each token: [N, vocab]."""
    num_tokens = len(tokens)
    num_pages = -(-num_tokens // _PAGE_TOKENS)
    components = model.components(_PAGE_TOKENS)
    layout = PoolLayout(components, num_pages=num_pages, num_slots=1)
    pool = memoryview(bytearray(layout.total_bytes))
    state = tuple(torch.from_numpy(layout.view(pool, i)) for i in range(len(components)))
    batch = Batch(
        tokens=torch.tensor(tokens),
        positions=torch.arange(num_tokens),
        query_start=torch.tensor([0, num_tokens], dtype=torch.int32),
        context_lens=torch.tensor([num_tokens], dtype=torch.int32),
        block_tables=torch.arange(num_pages, dtype=torch.int32).unsqueeze(0),
        slots=torch.zeros(1, dtype=torch.int32),
        logit_rows=torch.arange(num_tokens),
    )
    return model.forward(batch, state)


def compare(name: str, logits: torch.Tensor, exact: torch.Tensor, tokens: list[int]) -> list[Row]:
    error = (logits - exact).abs()
    agreement = (logits.argmax(dim=-1) == exact.argmax(dim=-1)).float().mean()
    return [
        figure(f"perplexity-{name}", "", [perplexity(logits, tokens)], against=perplexity(exact, tokens)),
        figure(f"logit-error-mean-{name}", "", [float(error.mean())]),
        figure(f"logit-error-max-{name}", "", [float(error.max())]),
        figure(f"agreement-{name}", "%", [100 * float(agreement)]),
    ]


def perplexity(logits: torch.Tensor, tokens: list[int]) -> float:
    return float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:])).exp())


if __name__ == "__main__":
    main()
