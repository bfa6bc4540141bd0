"""Llama's files: how GGUF (architecture `llama`) and Hugging Face (LlamaForCausalLM) name and order things."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from shared.engine.weights.dense import DenseNames, DenseNumbers, check_numbers, plan_dense, rope_inv_freq
from shared.engine.weights.errors import InvalidModel
from shared.engine.weights.gguf_file import GgufFile
from shared.engine.weights.hf_dir import HfDir
from shared.engine.weights.plan import ModelPlan, optional_number, whole_number

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
)
HF_NAMES = DenseNames(
    embed="model.embed_tokens.weight",
    norm="model.norm.weight",
    lm_head="lm_head.weight",
    input_norm="model.layers.{i}.input_layernorm.weight",
    q="model.layers.{i}.self_attn.q_proj.weight",
    k="model.layers.{i}.self_attn.k_proj.weight",
    v="model.layers.{i}.self_attn.v_proj.weight",
    o="model.layers.{i}.self_attn.o_proj.weight",
    post_norm="model.layers.{i}.post_attention_layernorm.weight",
    gate="model.layers.{i}.mlp.gate_proj.weight",
    up="model.layers.{i}.mlp.up_proj.weight",
    down="model.layers.{i}.mlp.down_proj.weight",
)
_BOS_KEY = "tokenizer.ggml.bos_token_id"
_MAX_LEN_KEY = "max_position_embeddings"
_ROPE_FREQS = "rope_freqs.weight"
_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def plan_gguf(file: GgufFile) -> ModelPlan:
    """Raises InvalidModel where the file is not a dense Llama that can be computed exactly."""
    fields = file.fields

    def field(key: str, default: Any = None) -> Any:
        value = fields.get(f"llama.{key}", default)
        if value is None:
            raise InvalidModel(f"{file} does not say llama.{key}")
        return value

    heads = field("attention.head_count")
    numbers = check_numbers(
        DenseNumbers,
        file,
        num_layers=field("block_count"),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_heads=heads,
        num_kv_heads=field("attention.head_count_kv", heads),
        head_dim=_head_dim(file, fields.get("llama.attention.key_length"), field("embedding_length"), heads),
        norm_eps=_shortest(field("attention.layer_norm_rms_epsilon")),
        rope_base=_shortest(field("rope.freq_base", 10000.0)),
        tied=GGUF_NAMES.lm_head not in file.names,
    )
    inv_freq = rope_inv_freq(numbers.rope_base, numbers.head_dim)
    if field("rope.dimension_count", numbers.head_dim) != numbers.head_dim:
        raise InvalidModel(f"{file} turns only a part of each head, which is not supported")
    scaling = field("rope.scaling.type", "none")
    if scaling == "linear":
        inv_freq = inv_freq / np.float32(field("rope.scaling.factor"))
    elif scaling != "none":
        raise InvalidModel(f"{file} asks for rope scaling {scaling!r}, which is not supported")
    also_used = frozenset({_ROPE_FREQS} & file.names)
    if also_used:
        if file.shape(_ROPE_FREQS) != inv_freq.shape:
            raise InvalidModel(f"{file}: tensor {_ROPE_FREQS} has the shape {file.shape(_ROPE_FREQS)}")
        inv_freq = inv_freq / file.read(_ROPE_FREQS)
    vocab_size = file.shape(GGUF_NAMES.embed)[0]
    return ModelPlan(
        architecture="llama",
        vocab_size=vocab_size,
        max_model_len=whole_number(file, "llama.context_length", field("context_length"), 1),
        eos_token_ids=tuple(sorted({whole_number(file, key, fields[key]) for key in _EOS_KEYS if key in fields})),
        bos_token_id=optional_number(file, _BOS_KEY, fields.get(_BOS_KEY)),
        numbers=numbers.model_dump(),
        tensors=plan_dense(
            file,
            GGUF_NAMES,
            numbers,
            inv_freq,
            vocab_size=vocab_size,
            also_used=also_used,
            reorder_heads=_half_split,
        ),
    )


def plan_hf(directory: HfDir) -> ModelPlan:
    """Raises InvalidModel where the directory is not a dense Llama that can be computed exactly."""
    config = directory.config
    for key, allowed in (
        ("hidden_act", ("silu", None)),
        ("attention_bias", (False, None)),
        ("mlp_bias", (False, None)),
        ("quantization_config", (None,)),
    ):
        if config.get(key) not in allowed:
            raise InvalidModel(f"{directory}: {key} = {config[key]!r} is not supported")
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    numbers = check_numbers(
        DenseNumbers,
        directory,
        num_layers=config.get("num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=config.get("intermediate_size"),
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=_head_dim(directory, config.get("head_dim"), hidden, heads),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_base=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        tied=config.get("tie_word_embeddings", False),
    )
    vocab_size = directory.shape(HF_NAMES.embed)[0]
    # A tied model may still carry its head, and old checkpoints carry the rotary table: both say nothing new.
    also_used = frozenset(
        name
        for name in directory.names
        if name.endswith("rotary_emb.inv_freq") or (numbers.tied and name == HF_NAMES.lm_head)
    )
    inv_freq = _scaled(directory, rope, rope_inv_freq(numbers.rope_base, numbers.head_dim))
    return ModelPlan(
        architecture="llama",
        vocab_size=vocab_size,
        max_model_len=whole_number(directory, _MAX_LEN_KEY, config.get(_MAX_LEN_KEY), 1),
        eos_token_ids=directory.eos_token_ids(),
        bos_token_id=optional_number(directory, "bos_token_id", config.get("bos_token_id")),
        numbers=numbers.model_dump(),
        tensors=plan_dense(directory, HF_NAMES, numbers, inv_freq, vocab_size=vocab_size, also_used=also_used),
    )


def _head_dim(where: object, said: Any, hidden: Any, heads: Any) -> Any:
    if said is not None:
        return said
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1 or hidden % heads:
        raise InvalidModel(f"{where}: {heads!r} heads do not divide a hidden size of {hidden!r}")
    return hidden // heads


def _shortest(value: float) -> float:
    """GGUF stores float32; the decimal its author wrote is the shortest one that rounds to it."""
    return float(str(np.float32(value)))


def _half_split(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp interleaves the halves of each head of q and k for its rotary kernel; ours wants them as trained."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _scaled(directory: HfDir, rope: Mapping[str, Any], inv_freq: np.ndarray) -> np.ndarray:
    """Applies `rope_scaling` as transformers does: none, linear, or Llama 3.1's own."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return inv_freq
    try:
        if kind == "linear":
            return inv_freq / np.float32(rope["factor"])
        if kind == "llama3":
            return _llama3_scaled(rope, inv_freq)
    except (KeyError, TypeError) as error:
        raise InvalidModel(f"{directory}: rope scaling {kind!r} is incomplete ({error})") from error
    raise InvalidModel(f"{directory} asks for rope scaling {kind!r}, which is not supported")


def _llama3_scaled(rope: Mapping[str, Any], inv_freq: np.ndarray) -> np.ndarray:
    """Slow turns are divided by `factor`, fast ones stay, those between are blended."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * inv_freq.astype(np.float64) / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(((1 - share) / factor + share) * inv_freq, dtype=np.float32)
