"""Real geometries with random weights, made on the device: what a step costs does not depend on what weights say."""

from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.ops import Ops
from shared.engine.models.dense import DenseDecoder
from shared.engine.weights.catalog import PreparedModel
from shared.engine.weights.dense import DenseNumbers
from shared.engine.weights.prepared import FORMAT_VERSION, ModelFile


@dataclass(frozen=True, slots=True)
class Geometry:
    name: str
    vocab_size: int
    max_model_len: int
    numbers: DenseNumbers

    def num_weights(self) -> int:
        n = self.numbers
        heads = (n.num_heads + 2 * n.num_kv_heads + n.num_heads) * n.head_dim
        layer = n.hidden_size * (heads + 3 * n.intermediate_size)
        return n.num_layers * layer + self.vocab_size * n.hidden_size * (1 if n.tied else 2)


def _geometry(name: str, vocab_size: int, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, dim: int,
              *, tied: bool, max_model_len: int = 8192) -> Geometry:  # fmt: skip
    numbers = DenseNumbers(
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        norm_eps=1e-5,
        rope_base=500000.0,
        tied=tied,
    )
    return Geometry(name, vocab_size, max_model_len, numbers)


SMOLLM2_135M = _geometry("smollm2-135m", 49152, 30, 576, 1536, 9, 3, 64, tied=True)
LLAMA_8B = _geometry("llama-8b", 128256, 32, 4096, 14336, 32, 8, 128, tied=False)
TINY = _geometry("tiny", 300, 2, 64, 96, 3, 1, 64, tied=True, max_model_len=512)


def random_model(
    geometry: Geometry, ops: Ops, device: torch.device, dtype: str = "bfloat16", kv_dtype: str = "float16"
) -> DenseDecoder:
    n, kind = geometry.numbers, getattr(torch, dtype)
    random = torch.Generator(device).manual_seed(0)

    def matrix(num_out: int, width: int) -> torch.Tensor:
        return torch.empty(num_out, width, dtype=kind, device=device).normal_(std=width**-0.5, generator=random)

    ones = torch.ones(n.hidden_size, dtype=kind, device=device)
    frequencies = n.rope_base ** -(torch.arange(0, n.head_dim, 2, device=device) / n.head_dim)
    weights = {"norm": ones, "rope_inv_freq": frequencies, "embed": matrix(geometry.vocab_size, n.hidden_size)}
    if not n.tied:
        weights["lm_head"] = matrix(geometry.vocab_size, n.hidden_size)
    q_rows, qkv_rows = n.num_heads * n.head_dim, (n.num_heads + 2 * n.num_kv_heads) * n.head_dim
    for i in range(n.num_layers):
        parts = {
            "input_norm": ones,
            "post_norm": ones,
            "qkv": matrix(qkv_rows, n.hidden_size),
            "o": matrix(n.hidden_size, q_rows),
            "gate_up": matrix(2 * n.intermediate_size, n.hidden_size),
            "down": matrix(n.hidden_size, n.intermediate_size),
        }
        weights |= {f"layers.{i}.{name}": tensor for name, tensor in parts.items()}
    return DenseDecoder(_described(geometry), dict(weights), ops, dtype, kv_dtype)


def _described(geometry: Geometry) -> PreparedModel:
    config = ModelFile(
        format_version=FORMAT_VERSION,
        name=geometry.name,
        architecture="llama",
        identity=f"random {geometry.name}",
        source="random",
        vocab_size=geometry.vocab_size,
        max_model_len=geometry.max_model_len,
        eos_token_ids=(0,),
        bos_token_id=None,
        weights_digest="",
        weights_bytes=0,
        numbers=geometry.numbers.model_dump(),
    )
    return PreparedModel(Path("random"), config.name, config.identity, config)
