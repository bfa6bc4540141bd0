"""Every dense decoder of Llama's kind: RMS norm, rotary grouped-query attention, gated MLP. The families differ in the
numbers they bring: biases, norms of q and k, a stretched rotary embedding.

Shapes: T new tokens, H hidden, Hq / Hkv query and key-value heads of D, F inner size of the MLP.
"""

from dataclasses import dataclass

import numpy as np
import torch

from kernels.ops import Ops, get_ops
from kernels.packing import PackedWeight, take_rows
from kernels.reference import FP8_SCALE_BYTES, ReferenceOps
from shared.engine.models.base import Batch
from shared.engine.watch import LayerDone
from shared.engine.weights.catalog import PreparedModel
from shared.engine.weights.dense import DenseNumbers, check_numbers
from shared.engine.weights.formats import FLOAT32
from shared.engine.weights.packed import open_packed
from shared.engine.weights.prepared import open_weights
from shared.state.components import IndexKind, StateComponent

Matrix = torch.Tensor | PackedWeight
Weights = dict[str, Matrix]


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """The weights of one layer, [out, in] each, never written. None: this model has none of it."""

    input_norm: torch.Tensor
    qkv: Matrix
    o: Matrix
    post_norm: torch.Tensor
    gate_up: Matrix
    down: Matrix
    qkv_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


class DenseDecoder:
    """One PAGE component, "kv": [layers, pages, 2, Hkv, page_tokens, row]. The compute thread owns it.

    Weights on any device and of any float type; batches and state on the same device. kv_dtype: float32, float16, or
    fp8, where a row is D codes and their float32 scale.
    """

    def __init__(
        self, prepared: PreparedModel, weights: Weights, ops: Ops, weights_name: str, kv_dtype: str = "float32"
    ) -> None:
        config = prepared.config
        self._embed = weights["embed"]  # [vocab, H]
        self.identity = identity_in(prepared.identity, weights_name, kv_dtype)
        self._kv_dtype = kv_dtype
        self.vocab_size = config.vocab_size
        self.max_model_len = config.max_model_len
        self.eos_token_ids = frozenset(config.eos_token_ids)
        self._numbers = n = check_numbers(DenseNumbers, prepared.directory, **config.numbers)
        self._ops = ops
        self._norm = _plain(weights, "norm")  # [H]
        self._lm_head = self._embed if n.tied else weights["lm_head"]  # [vocab, H]
        self._layers = tuple(_layer(weights, f"layers.{i}.") for i in range(n.num_layers))
        table = _cos_sin(_plain(weights, "rope_inv_freq"), self.max_model_len) * n.rope_attention_factor
        self._cos_sin = table.to(self._norm.dtype)  # [max_model_len, D]

    def components(self, page_tokens: int) -> tuple[StateComponent, ...]:
        n = self._numbers
        is_fp8 = self._kv_dtype == "fp8"
        kv = StateComponent(
            name="kv",
            index=IndexKind.PAGE,
            unit_tokens=page_tokens,
            outer=(2, n.num_kv_heads),
            inner=(n.head_dim + FP8_SCALE_BYTES if is_fp8 else n.head_dim,),
            dtype="uint8" if is_fp8 else self._kv_dtype,
            layers=tuple(range(n.num_layers)),
            shard_axis=1,
        )
        return (kv,)

    @torch.inference_mode()
    def forward(
        self, batch: Batch, state: tuple[torch.Tensor, ...], layer_done: LayerDone | None = None
    ) -> torch.Tensor:
        ops, eps = self._ops, self._numbers.norm_eps
        (kv,) = state
        last = len(self._layers) - 1
        residual = self._embedded(batch.tokens)  # [T, H]
        x = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        for i, layer in enumerate(self._layers):
            x = self._attention(x, layer, kv[i], batch)
            if layer_done is not None:
                layer_done(i)
            if i == last:  # only rows whose logits are wanted matter from here on: [R, H]
                x, residual = x[batch.logit_rows], residual[batch.logit_rows]
                if not len(x):
                    return x.new_empty(0, self.vocab_size, dtype=torch.float32)
            x, residual = ops.add_rms_norm(x, residual, layer.post_norm, eps)
            x = ops.silu_mul(ops.linear(x, layer.gate_up, layer.gate_up_bias))
            x = ops.linear(x, layer.down, layer.down_bias)
            following = self._norm if i == last else self._layers[i + 1].input_norm
            x, residual = ops.add_rms_norm(x, residual, following, eps)
        return ops.linear(x, self._lm_head).float()  # [R, vocab]

    def _attention(self, x: torch.Tensor, layer: DenseLayer, kv: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x [T, H] -> [T, H]; writes the new positions' keys and values to kv [P, 2, Hkv, B, row]."""
        ops, n = self._ops, self._numbers
        heads = ops.linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, n.head_dim)  # [T, Hq + 2 Hkv, D]
        q, k, v = heads.split_with_sizes((n.num_heads, n.num_kv_heads, n.num_kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._each_head_normed(q, layer.q_norm), self._each_head_normed(k, layer.k_norm)
        tables, starts = batch.block_tables, batch.query_start
        q = ops.rotary_and_store(q, k, v, self._cos_sin, batch.positions, kv, tables, starts)
        out = ops.paged_attention(q, kv, tables, starts, batch.context_lens, n.head_dim**-0.5)  # [T, Hq, D]
        return ops.linear(out.flatten(1), layer.o, layer.o_bias)

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        if isinstance(self._embed, PackedWeight):
            return torch.from_numpy(take_rows(self._embed, tokens.numpy()))
        return self._embed[tokens]

    def _each_head_normed(self, heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        flat = heads.reshape(-1, heads.shape[-1])  # [T · heads, D]
        return self._ops.rms_norm(flat, weight, self._numbers.norm_eps).view(heads.shape)


def load(prepared: PreparedModel, device: str, dtype: str, weights: str, kv_dtype: str) -> DenseDecoder:
    """On a CPU the weights stay a mapped file, shared with the machine's other workers; other devices and types get
    copies. The rotary frequencies are float32 whatever the rest is."""
    if weights != FLOAT32:
        return DenseDecoder(prepared, _packed(prepared, weights), get_ops(device), weights, kv_dtype)
    file = open_weights(prepared.directory, prepared.config)
    kind = getattr(torch, dtype)
    tensors: Weights = {}
    for name in file.names:
        tensor = torch.from_numpy(file.read(name))
        tensors[name] = tensor.to(device, torch.float32 if name == "rope_inv_freq" else kind)
    ops = ReferenceOps() if device == "cpu" and kind is not torch.float32 else get_ops(device)
    # Named apart from weights that are narrow only in memory, as on a CPU: here everything is computed in that type.
    name = FLOAT32 if kind is torch.float32 else f"all-{dtype}"
    return DenseDecoder(prepared, tensors, ops, name, kv_dtype)


def _packed(prepared: PreparedModel, weights: str) -> Weights:
    from kernels.cpu.linear import fit_for_this_machine

    fit: Weights = {}
    for name, value in open_packed(prepared, weights).items():
        fit[name] = torch.from_numpy(value) if isinstance(value, np.ndarray) else fit_for_this_machine(value)
    return fit


def identity_in(identity: str, weights_name: str, kv_dtype: str) -> str:
    """Workers that compute with different weights, or keep state in different types, are not each other's: what one has
    is not what the other computes. The names are legible, because a refusal shows both identities."""
    return f"{identity}:{weights_name}:kv-{kv_dtype}"


def _layer(weights: Weights, prefix: str) -> DenseLayer:
    parts = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    return DenseLayer(**parts)  # type: ignore[arg-type]


def _plain(weights: Weights, name: str) -> torch.Tensor:
    tensor = weights[name]
    assert isinstance(tensor, torch.Tensor)
    return tensor


def _cos_sin(inv_freq: torch.Tensor, max_len: int) -> torch.Tensor:
    """[max_len, D]: cosines, then sines, of position times frequency, in float32 as the model was trained."""
    positions = torch.arange(max_len, dtype=torch.float32, device=inv_freq.device)
    angles = torch.outer(positions, inv_freq)
    return torch.cat((angles.cos(), angles.sin()), dim=1)
