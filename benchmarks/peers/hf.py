"""Hugging Face transformers in float32. The weights are random: they do not change what a step costs."""

import sys
import time
from typing import Any

import torch
from lines import prompt, serve  # type: ignore[import-not-found]
from transformers import LlamaConfig, LlamaForCausalLM

_SMOLLM2_135M = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def start() -> Any:
    torch.set_num_threads(int(sys.argv[1]))
    model = LlamaForCausalLM(LlamaConfig(**_SMOLLM2_135M, attn_implementation="sdpa")).eval()

    @torch.inference_mode()
    def measure(kind: str, **arguments: int) -> float:
        return prefill(**arguments) if kind == "prefill" else decode(**arguments)

    def prefill(length: int, seed: int) -> float:
        ids = torch.tensor([prompt(length, seed)])
        began = time.perf_counter()
        model(ids, use_cache=True, logits_to_keep=1)
        return length / (time.perf_counter() - began)

    def decode(batch: int, context: int, steps: int) -> float:
        cache = model(torch.tensor([prompt(context, 1)]), use_cache=True, logits_to_keep=1).past_key_values
        cache.batch_repeat_interleave(batch)
        ids = torch.full((batch, 1), 5)
        ends = []
        for _ in range(steps + 1):
            ids = model(ids, past_key_values=cache, use_cache=True).logits[:, -1].argmax(dim=-1, keepdim=True)
            ends.append(time.perf_counter())
        return batch * steps / (ends[-1] - ends[0])

    return measure


if __name__ == "__main__":
    serve(start)
