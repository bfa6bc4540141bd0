"""The Llama forward on tiny models: against an independent dense computation, and the same for any cut of the work."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shared.engine.models.base import Model
from shared.engine.models.registry import load_model
from shared.engine.weights.catalog import prepare
from tests.support_model import PagedSequences
from tests.support_tiny_model import (
    HEAD_DIM,
    HEADS,
    INNER,
    KV_HEADS,
    LAYERS,
    VOCAB,
    Weights,
    tiny_weights,
    write_gguf,
    write_hf,
)

ROUNDING = 5e-5
PROMPT = [(i * 37 + 11) % 256 for i in range(45)]
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def dense_logits(weights: Weights, tokens: list[int], turn: torch.Tensor) -> torch.Tensor:
    """[T, vocab] in float64, head by head, without pages, fusions or a cache. turn: [D / 2] radians a position."""
    w = {name: torch.from_numpy(array).double() for name, array in weights.items()}
    angles = torch.outer(torch.arange(len(tokens)).double(), turn.double())
    turned = torch.polar(torch.ones_like(angles), angles)  # complex, [T, D / 2]
    causal = torch.ones(len(tokens), len(tokens)).triu(1).bool()

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w[name]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        half = HEAD_DIM // 2
        pairs = torch.complex(x[:, :half], x[:, half:]) * turned
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    x = w["model.embed_tokens.weight"][tokens]
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        y = norm(x, at + "input_layernorm.weight")
        heads = []
        for h in range(HEADS):
            g = h // (HEADS // KV_HEADS)
            q = rotate(y @ w[at + "self_attn.q_proj.weight"][h * HEAD_DIM : (h + 1) * HEAD_DIM].T)
            k = rotate(y @ w[at + "self_attn.k_proj.weight"][g * HEAD_DIM : (g + 1) * HEAD_DIM].T)
            v = y @ w[at + "self_attn.v_proj.weight"][g * HEAD_DIM : (g + 1) * HEAD_DIM].T
            scores = (q @ k.T / math.sqrt(HEAD_DIM)).masked_fill(causal, -math.inf)
            heads.append(scores.softmax(-1) @ v)
        x = x + torch.cat(heads, dim=-1) @ w[at + "self_attn.o_proj.weight"].T
        y = norm(x, at + "post_attention_layernorm.weight")
        gate, up = y @ w[at + "mlp.gate_proj.weight"].T, y @ w[at + "mlp.up_proj.weight"].T
        assert gate.shape[1] == INNER
        x = x + (gate * torch.sigmoid(gate) * up) @ w[at + "mlp.down_proj.weight"].T
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return norm(x, "model.norm.weight") @ head.T


def plain_turn() -> torch.Tensor:
    return torch.tensor([5000.0 ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)], dtype=torch.float64)


def llama3_turn() -> torch.Tensor:
    """Llama 3.1's rule, a wavelength at a time."""
    turns = []
    for value in plain_turn().tolist():
        wavelength = 2 * math.pi / value
        if wavelength < 64 / 4.0:
            turns.append(value)
        elif wavelength > 64 / 1.0:
            turns.append(value / 8.0)
        else:
            blend = (64 / wavelength - 1.0) / (4.0 - 1.0)
            turns.append((1 - blend) * value / 8.0 + blend * value)
    return torch.tensor(turns, dtype=torch.float64)


def loaded(source: Path, cache: Path) -> Model:
    return load_model(prepare(str(source), cache).directory)


def all_logits(model: Model, tokens: list[int] = PROMPT) -> torch.Tensor:
    return PagedSequences(model, 1, len(tokens), page_tokens=8).step({0: tokens}, every_row=True)


@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_a_dense_computation(tmp_path: Path, tied: bool) -> None:
    weights = tiny_weights(tied=tied)
    ours = all_logits(loaded(write_hf(tmp_path / "hf", weights), tmp_path))
    assert ours.dtype == torch.float32
    assert ours.shape == (len(PROMPT), len(VOCAB))
    expected = dense_logits(weights, PROMPT, plain_turn())
    assert expected.std() > 0.1
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "turn"),
    [
        ({"rope_scaling": LLAMA3_ROPE}, llama3_turn()),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, plain_turn() / 4),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}, plain_turn()),
    ],
)
def test_rope_settings_are_honoured(tmp_path: Path, config: dict[str, Any], turn: torch.Tensor) -> None:
    weights = tiny_weights()
    ours = all_logits(loaded(write_hf(tmp_path / "hf", weights, config=config), tmp_path))
    torch.testing.assert_close(ours.double(), dense_logits(weights, PROMPT, turn), rtol=0, atol=1e-4)


def test_rope_factors_of_a_gguf_are_honoured(tmp_path: Path) -> None:
    weights = tiny_weights()
    factors = np.linspace(1, 4, HEAD_DIM // 2, dtype=np.float32)
    ours = all_logits(loaded(write_gguf(tmp_path / "model.gguf", weights, rope_freqs=factors), tmp_path))
    expected = dense_logits(weights, PROMPT, plain_turn() / torch.from_numpy(factors))
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=1e-4)


def test_chunks_and_batches_change_only_the_rounding(tmp_path: Path) -> None:
    model = loaded(write_hf(tmp_path / "hf", tiny_weights()), tmp_path)
    whole = all_logits(model)
    other = PROMPT[7:30]
    sequences = PagedSequences(model, 2, len(PROMPT) + 1, page_tokens=8)
    got = [sequences.step({0: PROMPT[:13]}, every_row=True)]
    both = sequences.step({1: other, 0: PROMPT[13:40]}, every_row=True)
    got.append(both[len(other) :])
    for token in PROMPT[40:]:
        mixed = sequences.step({0: [token], 1: [3]})
        got.append(mixed[:1])
    torch.testing.assert_close(torch.cat(got), whole, rtol=0, atol=ROUNDING)
    torch.testing.assert_close(both[: len(other)], all_logits(model, other), rtol=0, atol=ROUNDING)


def test_only_the_wanted_rows_come_back(tmp_path: Path) -> None:
    model = loaded(write_hf(tmp_path / "hf", tiny_weights()), tmp_path)
    last = PagedSequences(model, 1, len(PROMPT)).step({0: PROMPT})
    torch.testing.assert_close(last, all_logits(model)[-1:], rtol=0, atol=ROUNDING)
    sequences = PagedSequences(model, 1, len(PROMPT))
    none = sequences.step({0: PROMPT[:-1]}, rows=[])
    assert none.shape == (0, len(VOCAB))
    torch.testing.assert_close(sequences.step({0: PROMPT[-1:]}), last, rtol=0, atol=ROUNDING)


def test_state_is_one_page_component(tmp_path: Path) -> None:
    model = loaded(write_hf(tmp_path / "hf", tiny_weights()), tmp_path)
    (kv,) = model.components(32)
    assert (kv.name, kv.unit_shape, kv.dtype) == ("kv", (2, KV_HEADS, 32, HEAD_DIM), "float32")
    assert (kv.shard_axis, kv.layers) == (1, (0, 1, 2))
    assert model.max_model_len == 512
    assert model.vocab_size == len(VOCAB)
