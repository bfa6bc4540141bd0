"""Every family equals `transformers` in logits and in greedy tokens, undivided and handed from engine to engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import kernels
from shared.engine.models.base import Model
from shared.engine.models.registry import load_model
from shared.engine.weights.catalog import prepare
from shared.protocol.messages import SamplingSpec
from shared.transfer.link import TicketKey
from tests.support_engine import EngineBench, deliver, first_tokens, running, undivided
from tests.support_families import build, reference_logits, reference_tokens, write_gguf, write_hf
from tests.support_model import PagedSequences

MAX_DIFFERENCE = 1e-4
NUM_TOKENS = 64
PROMPT = [(i * 37 + 11) % 256 for i in range(83)]
ROPE: Mapping[str, Mapping[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-plain": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 48,
        "attention_factor": 0.8,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": None,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
    },
}


@dataclass(frozen=True)
class Variant:
    """A model as transformers builds it, and how it is stored."""

    name: str
    family: str
    config: Mapping[str, Any] = field(default_factory=dict)
    num_shards: int = 1
    dtype: torch.dtype = torch.float32
    gguf: bool = False

    def __str__(self) -> str:
        return self.name


WIDE_HEADS = {"head_dim": 32}
VARIANTS = [
    Variant("llama", "llama"),
    Variant("llama-tied-sharded", "llama", {"tie_word_embeddings": True}, num_shards=3),
    Variant("llama-biases", "llama", {"attention_bias": True, "mlp_bias": True}),
    Variant("llama-linear", "llama", {"rope_parameters": ROPE["linear"]}),
    Variant("llama-llama3", "llama", {"rope_parameters": ROPE["llama3"], **WIDE_HEADS}, dtype=torch.bfloat16),
    Variant("llama-yarn-mscale", "llama", {"rope_parameters": ROPE["yarn-mscale"]}),
    Variant("llama-gguf-biases", "llama", {"attention_bias": True, "mlp_bias": True}, gguf=True),
    Variant("qwen2", "qwen2", num_shards=3, dtype=torch.float16),
    Variant("qwen2-tied", "qwen2", {"tie_word_embeddings": True, "use_sliding_window": True}),
    Variant("qwen2-yarn", "qwen2", {"rope_parameters": ROPE["yarn"]}),
    Variant("qwen2-gguf", "qwen2", gguf=True),
    Variant("qwen3", "qwen3", WIDE_HEADS, dtype=torch.bfloat16),
    Variant("qwen3-tied-sharded", "qwen3", {"tie_word_embeddings": True}, num_shards=2),
    Variant("qwen3-biases", "qwen3", {"attention_bias": True, "rope_parameters": ROPE["yarn-plain"]}),
    Variant("qwen3-gguf", "qwen3", {"tie_word_embeddings": True, **WIDE_HEADS}, gguf=True),
    Variant("mistral", "mistral", WIDE_HEADS),
    Variant("mistral-window", "mistral", {"sliding_window": 2048, "tie_word_embeddings": True}, num_shards=2),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
async def test_a_family_equals_transformers(tmp_path: Path, variant: Variant) -> None:
    stored = build(variant.family, dtype=variant.dtype, **variant.config)
    if variant.gguf:
        source = write_gguf(stored, tmp_path / "model.gguf")
    else:
        source = write_hf(stored, tmp_path / "hf", num_shards=variant.num_shards)
    ours, theirs = loaded(source, tmp_path), stored.float()

    expected = reference_logits(theirs, PROMPT)
    assert expected.std() > 0.3, "a model whose logits are all alike would show nothing"
    got = PagedSequences(ours, 1, len(PROMPT)).step({0: PROMPT}, every_row=True)
    assert float((got - expected).abs().max()) <= MAX_DIFFERENCE

    tokens = reference_tokens(theirs, PROMPT, NUM_TOKENS)
    assert len(set(tokens)) > 8, "a model that says one thing only would show nothing"
    sampling = SamplingSpec(temperature=0.0, max_tokens=NUM_TOKENS)
    assert undivided(tuple(PROMPT), sampling, ours) == [tokens]
    async with running(ours, page_tokens=8, prefill_chunk=24) as p, running(ours, page_tokens=8) as d:
        assert await handed_over(p, d, sampling) == tokens


async def handed_over(p: EngineBench, d: EngineBench, sampling: SamplingSpec) -> list[int]:
    key, prompt = TicketKey(1, 1), tuple(PROMPT)
    d.engine.reserve(key, prompt, sampling, decodes=True)
    chunks = await p.prefill(key, prompt, sampling)
    deliver(p, d, key, chunks)
    await p.engine.retire(key)
    [first] = first_tokens(chunks)
    d.engine.start_prefilled(key, (first,))
    await d.finish(key)
    await d.engine.retire(key)
    return [first.token, *d.text_of(key)]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
async def test_short_types_compute_what_transformers_computes_in_them(
    tmp_path: Path, family: str, kind: torch.dtype
) -> None:
    theirs = build(family, dtype=kind)
    dtype = str(kind).removeprefix("torch.")
    ours = loaded(write_hf(theirs, tmp_path / "hf"), tmp_path, dtype)
    expected, exact = reference_logits(theirs, PROMPT), reference_logits(theirs.float(), PROMPT)
    got = PagedSequences(ours, 1, len(PROMPT)).step({0: PROMPT}, every_row=True)
    rounding = float((expected - exact).abs().max())
    assert rounding > 1e-3, "the type makes no difference"
    assert float((got - exact).abs().mean()) <= 1.2 * float((expected - exact).abs().mean())
    sampling = SamplingSpec(temperature=0.0, max_tokens=8)
    async with running(ours, page_tokens=8, prefill_chunk=24) as p, running(ours, page_tokens=8) as d:
        assert [await handed_over(p, d, sampling)] == undivided(tuple(PROMPT), sampling, ours)


def test_workers_of_different_types_do_not_take_each_others_state(tmp_path: Path) -> None:
    source = write_hf(build("llama"), tmp_path / "hf")
    identities = {loaded(source, tmp_path, dtype).identity for dtype in ("float32", "bfloat16", "float16")}
    prepared = prepare(str(source), tmp_path)
    identities.add(load_model(prepared.directory, weights="float16").identity)  # narrow in memory only
    assert len(identities) == 4
    assert f"{prepare(str(source), tmp_path).identity}:float32:kv-float32" in identities


def test_workers_that_keep_state_in_different_types_refuse_each_other_by_name(tmp_path: Path) -> None:
    source = write_hf(build("llama"), tmp_path / "hf")
    prepared = prepare(str(source), tmp_path)
    for kv_dtype in ("float32", "float16", "fp8"):
        assert (
            load_model(prepared.directory, kv_dtype=kv_dtype).identity == f"{prepared.identity}:float32:kv-{kv_dtype}"
        )


def test_our_kernels_and_theirs_keep_apart() -> None:
    """transformers looks for a package `kernels` too, and must neither run nor become ours."""
    assert Path(str(kernels.__file__)) == Path(__file__).parents[3] / "kernels" / "__init__.py"
    assert LlamaForCausalLM.__module__.startswith("transformers.")


def loaded(source: Path, cache: Path, dtype: str = "float32") -> Model:
    return load_model(prepare(str(source), cache).directory, dtype=dtype)
