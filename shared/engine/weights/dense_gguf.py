"""How GGUF files describe dense decoders: the same tensor names and metadata keys for every family."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from shared.engine.weights.dense import (
    DenseNames,
    DenseNumbers,
    ReorderHeads,
    as_it_is,
    bias_of,
    check_numbers,
    plan_dense,
)
from shared.engine.weights.dense_hf import head_dim_of, refuse_window
from shared.engine.weights.errors import InvalidModel
from shared.engine.weights.gguf_file import GgufFile
from shared.engine.weights.plan import ModelPlan, optional_number, whole_number
from shared.engine.weights.rope import DEFAULT_BASE, Rope, stretched_rope

GGUF_NAMES = DenseNames(
    embed="token_embd.weight",
    norm="output_norm.weight",
    lm_head="output.weight",
    input_norm="blk.{i}.attn_norm.weight",
    q="blk.{i}.attn_q.weight",
    k="blk.{i}.attn_k.weight",
    v="blk.{i}.attn_v.weight",
    o="blk.{i}.attn_output.weight",
    post_norm="blk.{i}.ffn_norm.weight",
    gate="blk.{i}.ffn_gate.weight",
    up="blk.{i}.ffn_up.weight",
    down="blk.{i}.ffn_down.weight",
    q_norm="blk.{i}.attn_q_norm.weight",
    k_norm="blk.{i}.attn_k_norm.weight",
)
_BOS_KEY = "tokenizer.ggml.bos_token_id"
_NEUTRAL = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}
_ROPE_FREQS = "rope_freqs.weight"
_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def plan_dense_gguf(
    file: GgufFile, architecture: str, *, reorder_heads: ReorderHeads = as_it_is, qk_norm: bool = False
) -> ModelPlan:
    """architecture: of the file, which prefixes its keys. Biases are there where the file has them. Raises InvalidModel
    where the file cannot be computed exactly."""
    fields = _Fields(file, architecture)
    if fields.get("expert_count", 0):
        raise InvalidModel(f"{file} is a mixture of experts, which is not supported for {architecture!r}")
    heads, hidden = fields.need("attention.head_count"), fields.need("embedding_length")
    max_len = whole_number(file, f"{architecture}.context_length", fields.need("context_length"), 1)
    refuse_window(file, fields.get("attention.sliding_window") or None, max_len)
    numbers = check_numbers(
        DenseNumbers,
        file,
        num_layers=fields.need("block_count"),
        hidden_size=hidden,
        intermediate_size=fields.need("feed_forward_length"),
        num_heads=heads,
        num_kv_heads=fields.get("attention.head_count_kv", heads),
        head_dim=fields.head_dim(hidden, heads),
        norm_eps=_shortest(fields.need("attention.layer_norm_rms_epsilon")),
        rope_base=_shortest(fields.get("rope.freq_base", DEFAULT_BASE)),
        tied=GGUF_NAMES.lm_head not in file.names,
        qkv_bias=bias_of(GGUF_NAMES.q).format(i=0) in file.names,
        o_bias=bias_of(GGUF_NAMES.o).format(i=0) in file.names,
        mlp_bias=bias_of(GGUF_NAMES.down).format(i=0) in file.names,
        qk_norm=qk_norm,
    )
    rope = stretched_rope(file, fields.rope_settings(), numbers.rope_base, numbers.head_dim, max_len)
    inv_freq, also_used = _with_factors(file, rope)
    numbers = numbers.model_copy(update={"rope_attention_factor": rope.attention_factor})
    vocab_size = file.shape(GGUF_NAMES.embed)[0]
    return ModelPlan(
        architecture=architecture,
        vocab_size=vocab_size,
        max_model_len=max(max_len, rope.reach),
        eos_token_ids=_eos_token_ids(file),
        bos_token_id=optional_number(file, _BOS_KEY, file.fields.get(_BOS_KEY)),
        numbers=numbers.model_dump(exclude_defaults=True),
        tensors=plan_dense(
            file,
            GGUF_NAMES,
            numbers,
            inv_freq,
            vocab_size=vocab_size,
            also_used=also_used,
            reorder_heads=reorder_heads,
        ),
        gguf_fields=file.fields,
    )


class _Fields:
    """The metadata of one architecture."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._file, self._architecture = file, architecture

    def get(self, key: str, default: Any = None) -> Any:
        return self._file.fields.get(f"{self._architecture}.{key}", default)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise InvalidModel(f"{self._file} does not say {self._architecture}.{key}")
        return value

    def head_dim(self, hidden: Any, heads: Any) -> Any:
        dim = head_dim_of(self._file, self.get("attention.key_length"), hidden, heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self.get(key, dim) != dim:
                named = f"{self._architecture}.{key} = {self.get(key)} with heads of {dim}"
                raise InvalidModel(f"{self._file}: {named} is not supported")
        return dim

    def rope_settings(self) -> Mapping[str, Any]:
        """As a config.json would say it. A factor without a kind means linear, as for llama.cpp."""
        factor = self.get("rope.scaling.factor") or self.get("rope.scale_linear")
        kind = self.get("rope.scaling.type", "linear" if factor else "none")
        if kind == "none" or (kind == "linear" and not factor):
            return {}
        settings = {
            "rope_type": kind,
            "factor": factor,
            "original_max_position_embeddings": self.get("rope.scaling.original_context_length"),
            "beta_fast": self.get("rope.scaling.yarn_beta_fast"),
            "beta_slow": self.get("rope.scaling.yarn_beta_slow"),
        }
        for key, neutral in _NEUTRAL.items():
            if self.get(f"rope.scaling.{key}", neutral) != neutral:
                raise InvalidModel(f"{self._file}: {self._architecture}.rope.scaling.{key} is not supported")
        return settings


def _eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    return tuple(sorted({whole_number(file, key, file.fields[key]) for key in _EOS_KEYS if key in file.fields}))


def _with_factors(file: GgufFile, rope: Rope) -> tuple[np.ndarray, frozenset[str]]:
    """Files of Llama 3.1 and later bring their frequencies' divisors as a tensor."""
    if _ROPE_FREQS not in file.names:
        return rope.inv_freq, frozenset()
    if file.shape(_ROPE_FREQS) != rope.inv_freq.shape:
        raise InvalidModel(f"{file}: tensor {_ROPE_FREQS} has the shape {file.shape(_ROPE_FREQS)}")
    return rope.inv_freq / file.read(_ROPE_FREQS), frozenset({_ROPE_FREQS})


def _shortest(value: float) -> float:
    """GGUF stores float32; the decimal its author wrote is the shortest one that rounds to it."""
    return float(str(np.float32(value)))
