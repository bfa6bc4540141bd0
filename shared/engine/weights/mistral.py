"""Mistral: Llama's arithmetic, with attention over a window where the config says one. Its GGUF files say `llama`."""

from shared.engine.weights.dense_hf import plan_dense_hf, refuse_window
from shared.engine.weights.hf_dir import HfDir
from shared.engine.weights.plan import ModelPlan

_DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}


def plan_hf(directory: HfDir) -> ModelPlan:
    config = {**_DEFAULTS, **directory.config}
    refuse_window(directory, config["sliding_window"], config.get("max_position_embeddings"))
    return plan_dense_hf(directory, "mistral", config)
