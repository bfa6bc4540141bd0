"""Llama: the plain dense decoder. Its config may add biases; llama.cpp changes the order of its q and k."""

import numpy as np

from shared.engine.weights.dense_gguf import plan_dense_gguf
from shared.engine.weights.dense_hf import plan_dense_hf
from shared.engine.weights.gguf_file import GgufFile
from shared.engine.weights.hf_dir import HfDir
from shared.engine.weights.plan import ModelPlan, said


def plan_hf(directory: HfDir) -> ModelPlan:
    config = directory.config
    bias, mlp_bias = (said(directory, config, key) for key in ("attention_bias", "mlp_bias"))
    return plan_dense_hf(directory, "llama", config, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)


def plan_gguf(file: GgufFile) -> ModelPlan:
    """Also Mistral's files: llama.cpp writes them under this name."""
    return plan_dense_gguf(file, "llama", reorder_heads=_half_split)


def _half_split(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp interleaves the halves of each head of q and k for its rotary kernel; ours wants them as trained.
    tensor: a weight [rows, columns] or its bias [rows]."""
    pairs = tensor.reshape(num_heads, len(tensor) // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)
