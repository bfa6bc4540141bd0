"""Llama and every dense decoder with the same arithmetic: RMS norm, rotary grouped-query attention, gated MLP.

Shapes: T new tokens, H hidden, Hq / Hkv query and key-value heads of D, F inner size of the MLP.
"""

from dataclasses import dataclass

import torch

from kernels.ops import Ops, get_ops
from shared.engine.models.base import Batch
from shared.engine.weights.catalog import PreparedModel
from shared.engine.weights.dense import DenseNumbers, check_numbers
from shared.engine.weights.prepared import KV_DTYPE, open_weights
from shared.state.components import IndexKind, StateComponent


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """The weights of one layer, [out, in] each, mapped and never written."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class Llama:
    """One PAGE component, "kv": [layers, pages, 2, Hkv, page_tokens, D]. The compute thread owns it."""

    def __init__(self, prepared: PreparedModel, weights: dict[str, torch.Tensor], ops: Ops) -> None:
        config = prepared.config
        self.identity = prepared.identity
        self.vocab_size = config.vocab_size
        self.max_model_len = config.max_model_len
        self.eos_token_ids = frozenset(config.eos_token_ids)
        self._numbers = check_numbers(DenseNumbers, prepared.directory, **config.numbers)
        self._ops = ops
        self._embed = weights["embed"]  # [vocab, H]
        self._norm = weights["norm"]  # [H]
        self._lm_head = self._embed if self._numbers.tied else weights["lm_head"]  # [vocab, H]
        self._layers = tuple(
            LlamaLayer(**{name: weights[f"layers.{i}.{name}"] for name in LlamaLayer.__slots__})
            for i in range(self._numbers.num_layers)
        )
        self._cos_sin = _cos_sin(weights["rope_inv_freq"], self.max_model_len)  # [max_model_len, D]

    def components(self, page_tokens: int) -> tuple[StateComponent, ...]:
        n = self._numbers
        kv = StateComponent(
            name="kv",
            index=IndexKind.PAGE,
            unit_tokens=page_tokens,
            outer=(2, n.num_kv_heads),
            inner=(n.head_dim,),
            dtype=KV_DTYPE,
            layers=tuple(range(n.num_layers)),
            shard_axis=1,
        )
        return (kv,)

    @torch.inference_mode()
    def forward(self, batch: Batch, state: tuple[torch.Tensor, ...]) -> torch.Tensor:
        ops, eps = self._ops, self._numbers.norm_eps
        (kv,) = state
        last = len(self._layers) - 1
        residual = self._embed[batch.tokens]  # [T, H]
        x = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        for i, layer in enumerate(self._layers):
            x = self._attention(x, layer, kv[i], batch)
            if i == last:  # only rows whose logits are wanted matter from here on: [R, H]
                x, residual = x[batch.logit_rows], residual[batch.logit_rows]
                if not len(x):
                    return x.new_empty(0, self.vocab_size)
            x, residual = ops.add_rms_norm(x, residual, layer.post_norm, eps)
            x = ops.linear(ops.silu_mul(ops.linear(x, layer.gate_up)), layer.down)
            following = self._norm if i == last else self._layers[i + 1].input_norm
            x, residual = ops.add_rms_norm(x, residual, following, eps)
        return ops.linear(x, self._lm_head).float()  # [R, vocab]

    def _attention(self, x: torch.Tensor, layer: LlamaLayer, kv: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x [T, H] -> [T, H]; writes the new positions' keys and values to kv [P, 2, Hkv, B, D]."""
        ops, n = self._ops, self._numbers
        heads = ops.linear(x, layer.qkv).view(len(x), -1, n.head_dim)  # [T, Hq + 2 Hkv, D]
        q, k, v = torch.split(heads, [n.num_heads, n.num_kv_heads, n.num_kv_heads], dim=1)
        tables, starts = batch.block_tables, batch.query_start
        q = ops.rotary_and_store(q, k, v, self._cos_sin, batch.positions, kv, tables, starts)
        out = ops.paged_attention(q, kv, tables, starts, batch.context_lens, n.head_dim**-0.5)  # [T, Hq, D]
        return ops.linear(out.flatten(1), layer.o)


def load(prepared: PreparedModel, device: str) -> Llama:
    """On a CPU the weights stay the mapped file, shared with the machine's other workers; else they are copied."""
    file = open_weights(prepared.directory, prepared.config)
    weights = {name: torch.from_numpy(file.read(name)).to(device) for name in file.names}
    return Llama(prepared, weights, get_ops(device))


def _cos_sin(inv_freq: torch.Tensor, max_len: int) -> torch.Tensor:
    """[max_len, D]: cosines, then sines, of position times frequency, in float32 as the model was trained."""
    positions = torch.arange(max_len, dtype=torch.float32, device=inv_freq.device)
    angles = torch.outer(positions, inv_freq)
    return torch.cat((angles.cos(), angles.sin()), dim=1)
