"""Tiny random models of every family by `transformers`, the reference, and the ways to write them as files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.utils import logging as transformers_logging

from shared.engine.weights.dense import bias_of
from shared.engine.weights.dense_gguf import GGUF_NAMES
from shared.engine.weights.dense_hf import HF_NAMES

transformers_logging.disable_progress_bar()

VOCAB_SIZE = 260
CONTEXT = 2048
_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
_SPECIAL = ("<s>", "</s>", "<|im_end|>")
_TOKENS = [*_BYTES, "ab", *_SPECIAL]
_SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "eos_token_id": None,
    "bos_token_id": None,
}
FAMILIES: Mapping[str, tuple[type[PreTrainedConfig], Mapping[str, Any]]] = {
    "llama": (LlamaConfig, {"head_dim": 16}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "mistral": (MistralConfig, {"sliding_window": None}),
}


def build(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any) -> PreTrainedModel:
    """Eager attention, eval mode, deterministic weights. What transformers initialises to one value everywhere (norms,
    biases) is drawn anew, so that losing it shows in the logits."""
    kind, own = FAMILIES[family]
    chosen = kind(**{**_SHAPE, **own, **config})
    chosen.initializer_range = 0.2
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(chosen, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if float(parameter.std()) == 0.0:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
            parameter.data = parameter.to(dtype)  # not `model.to`, which would round the rotary frequencies too
    return model.eval()


def write_hf(model: PreTrainedModel, directory: Path, *, num_shards: int = 1, **config: Any) -> Path:
    """As `save_pretrained` writes it, and a tokenizer whose tokens are bytes. config: lines of config.json to change;
    None removes one."""
    parameters = {parameter.data_ptr(): parameter.numel() * parameter.itemsize for parameter in model.parameters()}
    largest = sum(parameters.values()) // num_shards + 1 if num_shards > 1 else 1 << 30
    model.save_pretrained(directory, max_shard_size=largest)
    assert (len(list(directory.glob("*.safetensors"))) > 1) == (num_shards > 1)
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(_TOKENS)}, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.save(str(directory / "tokenizer.json"))
    file = directory / "config.json"
    changed = {**json.loads(file.read_text()), **config}
    file.write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))
    return directory


def write_gguf(model: PreTrainedModel, path: Path, **fields: str | float) -> Path:
    """As llama.cpp's converter writes it. fields: more metadata, keys without the architecture."""
    family, config = model.config.model_type, model.config
    architecture = "llama" if family == "mistral" else family
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    for key, value in fields.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(f"{architecture}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(_TOKENS)
    writer.add_token_types([1] * 257 + [3] * 3)
    writer.add_token_merges(["a b"])
    state = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del state[HF_NAMES.lm_head]
    for name, array in _gguf_tensors(state, config.num_hidden_layers).items():
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        part = name.split(".")[-2]
        if architecture == "llama" and part in heads:
            array = _interleaved(array, heads[part])
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def reference_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """[T, vocab] float32, the whole text in one go and without a cache."""
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


def reference_tokens(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def _gguf_tensors(state: Mapping[str, np.ndarray], num_layers: int) -> dict[str, np.ndarray]:
    tensors = {}
    for part in HF_NAMES.__slots__:
        ours, theirs = getattr(HF_NAMES, part), getattr(GGUF_NAMES, part)
        for i in range(num_layers):
            for here, there in ((ours, theirs), (bias_of(ours), bias_of(theirs))):
                if here.format(i=i) in state:
                    tensors[there.format(i=i)] = state[here.format(i=i)]
    return tensors


def _interleaved(array: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k, weights and biases, of its `llama` architecture."""
    halves = array.reshape(num_heads, 2, len(array) // num_heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)
