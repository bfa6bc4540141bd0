"""vLLM's CPU build in float32, eager, with random weights. Arguments: threads, a directory for its
config.json."""

import json
import sys
import time
from pathlib import Path
from typing import Any

from lines import prompt, serve  # type: ignore[import-not-found]

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "float32",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def start() -> Any:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    directory = Path(sys.argv[2])
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_CONFIG))
    engine = LLM(
        model=str(directory),
        dtype="float32",
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=2560,
        max_num_seqs=64,
        enable_prefix_caching=True,
    )

    def took(prompts: list[list[int]], steps: int) -> float:
        sampling = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return time.perf_counter() - began

    def measure(kind: str, **arguments: int) -> float:
        if kind == "prefill":
            return arguments["length"] / took([prompt(arguments["length"], 1000 + arguments["seed"])], 1)
        batch, steps = arguments["batch"], arguments["steps"]
        prompts = [prompt(arguments["context"], seed) for seed in range(batch)]
        took(prompts, 1)  # from now on the prompts' state is in the prefix cache
        without = took(prompts, 1)
        return batch * steps / (took(prompts, steps + 1) - without)

    return measure


if __name__ == "__main__":
    serve(start)
