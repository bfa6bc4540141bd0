"""Qwen2 and Qwen2.5: q, k and v have biases, and the upper layers may attend over a window."""

from collections.abc import Mapping
from typing import Any

from shared.engine.weights.dense_gguf import plan_dense_gguf
from shared.engine.weights.dense_hf import plan_dense_hf, refuse_window
from shared.engine.weights.gguf_file import GgufFile
from shared.engine.weights.hf_dir import HfDir
from shared.engine.weights.plan import ModelPlan, said

_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}


def plan_hf(directory: HfDir) -> ModelPlan:
    config = {**_DEFAULTS, **directory.config}
    refuse_upper_windows(directory, config)
    return plan_dense_hf(directory, "qwen2", config, qkv_bias=True)


def plan_gguf(file: GgufFile) -> ModelPlan:
    return plan_dense_gguf(file, "qwen2")


def refuse_upper_windows(directory: HfDir, config: Mapping[str, Any]) -> None:
    """A window that is switched off, or that no layer uses, changes nothing."""
    layers, kinds = config.get("num_hidden_layers"), config.get("layer_types")
    above = isinstance(layers, int) and layers > config["max_window_layers"]
    used = "sliding_attention" in kinds if kinds is not None else above
    if said(directory, config, "use_sliding_window") and used:
        refuse_window(directory, config["sliding_window"], config.get("max_position_embeddings"))
