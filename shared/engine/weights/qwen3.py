"""Qwen3, dense: each head of q and k is normed before it is turned; heads are wider than the hidden size suggests."""

from shared.engine.weights.dense_gguf import plan_dense_gguf
from shared.engine.weights.dense_hf import plan_dense_hf
from shared.engine.weights.gguf_file import GgufFile
from shared.engine.weights.hf_dir import HfDir
from shared.engine.weights.plan import ModelPlan, said
from shared.engine.weights.qwen2 import refuse_upper_windows

_DEFAULTS = {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28}


def plan_hf(directory: HfDir) -> ModelPlan:
    config = {**_DEFAULTS, **directory.config}
    refuse_upper_windows(directory, config)
    bias = said(directory, config, "attention_bias")
    return plan_dense_hf(directory, "qwen3", config, qkv_bias=bias, o_bias=bias, qk_norm=True)


def plan_gguf(file: GgufFile) -> ModelPlan:
    return plan_dense_gguf(file, "qwen3", qk_norm=True)
