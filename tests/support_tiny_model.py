"""Tiny random Llama models written as files: one set of weights, as a GGUF and as a Hugging Face directory."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from shared.engine.weights.dense_gguf import GGUF_NAMES
from shared.engine.weights.dense_hf import HF_NAMES

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 3, 64, 96, 4, 2, 16
BOS, EOS, EXTRA_EOS = "<s>", "</s>", "<|im_end|>"
VOCAB = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", BOS, EOS, EXTRA_EOS]
BOS_ID, EOS_ID, EXTRA_EOS_ID = range(257, 260)
HF_CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 512,
    "vocab_size": len(VOCAB),
    "bos_token_id": BOS_ID,
    "eos_token_id": [EOS_ID, EXTRA_EOS_ID],
    "tie_word_embeddings": False,
}
Weights = dict[str, np.ndarray]


def tiny_weights(*, tied: bool = False, seed: int = 0) -> Weights:
    """By their Hugging Face names, in values that bfloat16 and float16 hold exactly."""
    shapes = {"embed": (len(VOCAB), HIDDEN), "norm": (HIDDEN,), "lm_head": (len(VOCAB), HIDDEN)}
    shapes |= {"input_norm": (HIDDEN,), "post_norm": (HIDDEN,), "q": (HEADS * HEAD_DIM, HIDDEN)}
    shapes |= {"k": (KV_HEADS * HEAD_DIM, HIDDEN), "v": (KV_HEADS * HEAD_DIM, HIDDEN), "o": (HIDDEN, HEADS * HEAD_DIM)}
    shapes |= {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    random = np.random.default_rng(seed)
    weights: Weights = {}
    for part, shape in shapes.items():
        for i in range(LAYERS):
            name = getattr(HF_NAMES, part).format(i=i)
            if name in weights or (tied and part == "lm_head"):
                continue
            raw = 1 + 0.1 * random.standard_normal(shape) if len(shape) == 1 else 0.2 * random.standard_normal(shape)
            weights[name] = torch.from_numpy(raw).bfloat16().half().float().numpy()
    return weights


def write_hf(
    directory: Path,
    weights: Weights,
    *,
    dtype: torch.dtype = torch.float32,
    num_shards: int = 1,
    config: Mapping[str, Any] = {},
) -> Path:
    """A model directory; with several shards also their index. `config` overrides the tiny model's."""
    directory.mkdir(parents=True)
    tied = HF_NAMES.lm_head not in weights
    (directory / "config.json").write_text(json.dumps({**HF_CONFIG, "tie_word_embeddings": tied, **config}))
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(VOCAB)}, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS, EXTRA_EOS])
    tokenizer.save(str(directory / "tokenizer.json"))
    tensors = {name: torch.from_numpy(array).to(dtype) for name, array in weights.items()}
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    names, weight_map = sorted(tensors), {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        save_file({name: tensors[name] for name in names[shard::num_shards]}, directory / file)
        weight_map.update(dict.fromkeys(names[shard::num_shards], file))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def write_gguf(
    path: Path,
    weights: Weights,
    *,
    quant: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str = "llama",
    rope_freqs: np.ndarray | None = None,
    extra: Mapping[str, np.ndarray] = {},
) -> Path:
    """As llama.cpp's converter writes it: norms in float32, q and k with their halves interleaved."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(VOCAB)
    writer.add_token_types([1] * 257 + [3] * 3)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_eot_token_id(EXTRA_EOS_ID)
    for name, array in _gguf_tensors(weights).items():
        kind = quant if array.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(array, kind), raw_dtype=kind)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs)
    for name, array in extra.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_tensors(weights: Weights) -> Weights:
    tensors: Weights = {}
    for part in HF_NAMES.__slots__:
        for i in range(LAYERS):
            array = weights.get(getattr(HF_NAMES, part).format(i=i))
            if array is None:
                continue
            if part in ("q", "k"):
                halves = array.reshape(HEADS if part == "q" else KV_HEADS, 2, HEAD_DIM // 2, HIDDEN)
                array = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
            tensors[getattr(GGUF_NAMES, part).format(i=i)] = array
    return tensors
