"""Reading model files: every route to the same weights, and one clear sentence for every file that cannot be used."""

import json
import re
import shutil
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from shared.engine.weights.catalog import PreparedModel, prepare
from shared.engine.weights.dense_hf import HF_NAMES
from shared.engine.weights.errors import InvalidModel
from shared.engine.weights.families import plan_source
from shared.engine.weights.gguf_file import GgufFile
from shared.engine.weights.hf_dir import HfDir
from shared.engine.weights.prepared import WEIGHTS_FILE
from shared.runtime.errors import BatonError
from tests.support_tiny_model import (
    BOS_ID,
    EOS_ID,
    EXTRA_EOS_ID,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    Weights,
    tiny_weights,
    write_gguf,
    write_hf,
)

Kind = gguf.GGMLQuantizationType


def weights_of(prepared: PreparedModel) -> Weights:
    return dict(load_file(prepared.directory / WEIGHTS_FILE))


def refusal(source: Path, cache: Path) -> str:
    """The one sentence `prepare` refuses with, having left nothing behind."""
    with pytest.raises(InvalidModel) as caught:
        prepare(str(source), cache)
    left = list((cache / "models").glob("*")) if (cache / "models").exists() else []
    assert [path.name for path in left if not path.name.endswith(".lock")] == []
    assert isinstance(caught.value, BatonError)
    assert str(source) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_final_layout_is_fused_float32(tmp_path: Path) -> None:
    raw = tiny_weights()
    prepared = prepare(str(write_hf(tmp_path / "Tiny Llama", raw)), tmp_path)
    got = weights_of(prepared)
    at = "model.layers.1."
    qkv = [raw[f"{at}self_attn.{part}_proj.weight"] for part in "qkv"]
    np.testing.assert_array_equal(got["layers.1.qkv"], np.concatenate(qkv))
    assert got["layers.1.qkv"].shape == ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN)
    gate_up = [raw[f"{at}mlp.gate_proj.weight"], raw[f"{at}mlp.up_proj.weight"]]
    np.testing.assert_array_equal(got["layers.1.gate_up"], np.concatenate(gate_up))
    assert got["layers.1.gate_up"].shape == (2 * INNER, HIDDEN)
    for ours, theirs in (
        ("down", "mlp.down_proj"),
        ("o", "self_attn.o_proj"),
        ("post_norm", "post_attention_layernorm"),
    ):
        np.testing.assert_array_equal(got[f"layers.1.{ours}"], raw[f"{at}{theirs}.weight"])
    np.testing.assert_array_equal(got["lm_head"], raw["lm_head.weight"])
    assert {array.dtype for array in got.values()} == {np.dtype("float32")}
    assert prepared.name == "tiny-llama"
    assert prepared.config.eos_token_ids == (EOS_ID, EXTRA_EOS_ID)
    assert prepared.config.bos_token_id == BOS_ID
    assert prepared.config.max_model_len == 512


@pytest.mark.parametrize("tied", [False, True])
def test_gguf_and_hugging_face_give_the_same_weights(tmp_path: Path, tied: bool) -> None:
    raw = tiny_weights(tied=tied)
    from_hf = prepare(str(write_hf(tmp_path / "hf", raw)), tmp_path)
    from_gguf = prepare(str(write_gguf(tmp_path / "model.gguf", raw)), tmp_path)
    assert from_gguf.config.weights_digest == from_hf.config.weights_digest
    assert from_gguf.config.numbers == from_hf.config.numbers
    assert from_gguf.config.eos_token_ids == from_hf.config.eos_token_ids
    assert ("lm_head" in weights_of(from_gguf)) is not tied


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_formats_are_widened(tmp_path: Path, dtype: torch.dtype) -> None:
    raw = tiny_weights()
    wide = prepare(str(write_hf(tmp_path / "wide", raw)), tmp_path)
    short = prepare(str(write_hf(tmp_path / "short", raw, dtype=dtype, num_shards=3)), tmp_path)
    assert short.config.weights_digest == wide.config.weights_digest


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0])
def test_quantized_tensors_are_what_gguf_dequantizes(tmp_path: Path, kind: Kind) -> None:
    raw = tiny_weights()
    file = GgufFile(write_gguf(tmp_path / "model.gguf", raw, quant=kind))
    name = "model.layers.2.mlp.down_proj.weight"
    np.testing.assert_array_equal(file.read("blk.2.ffn_down.weight"), dequantize(quantize(raw[name], kind), kind))
    # Quantizing goes by rows, so the order of q's rows does not matter: the whole route can be checked.
    rounded = {n: dequantize(quantize(a, kind), kind) if a.ndim > 1 else a for n, a in raw.items()}
    from_hf = prepare(str(write_hf(tmp_path / "hf", rounded)), tmp_path)
    assert prepare(str(file.path), tmp_path).config.weights_digest == from_hf.config.weights_digest


def test_every_format_that_gguf_dequantizes_is_read(tmp_path: Path) -> None:
    """Also those of 256-wide blocks that only llama.cpp can write: any bytes are valid blocks of them."""
    for kind in (Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_XS, Kind.IQ4_NL):
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        raw = np.random.default_rng(0).integers(0, 60, (3, 512 // block * block_bytes), dtype=np.uint8)
        writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
        writer.add_tensor("x", raw, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        file = GgufFile(tmp_path / "one.gguf")
        assert file.shape("x") == (3, 512)
        np.testing.assert_array_equal(file.read("x"), dequantize(raw, kind))


def test_metadata_is_read_as_gguf_reads_it(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_weights())
    theirs = {k: f.contents() for k, f in gguf.GGUFReader(path).fields.items() if not k.startswith("GGUF.")}
    assert dict(GgufFile(path).fields) == theirs


def test_a_truncated_gguf_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", tiny_weights()).read_bytes()
    cut = tmp_path / "cut.gguf"
    ends = [0, 3, 4, 7, 8, 20, 24, 100, len(whole) // 2, len(whole) - 40]
    for end in ends + list(range(30, 8000, 97)):
        cut.write_bytes(whole[:end])
        with pytest.raises(InvalidModel, match=re.escape(str(cut))):
            plan_source(cut)
    cut.write_bytes(whole[:2000])
    assert "truncated: its header" in refusal(cut, tmp_path)
    cut.write_bytes(whole[: len(whole) - 40])
    assert re.search(r"truncated: tensor \S+ ends at byte \d+, the file has \d+", refusal(cut, tmp_path))


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", tiny_weights())


@given(where=st.integers(0, 9000), byte=st.integers(0, 255))
def test_a_damaged_gguf_header_never_does_worse_than_a_refusal(small_gguf: Path, where: int, byte: int) -> None:
    data = bytearray(small_gguf.read_bytes())
    data[where] = byte
    damaged = small_gguf.with_name("damaged.gguf")
    damaged.write_bytes(data)
    with suppress(InvalidModel):
        plan_source(damaged)


def test_gguf_refusals_name_file_and_tensor(tmp_path: Path) -> None:
    raw = tiny_weights()
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not a model at all, only text")
    assert "is not a GGUF file" in refusal(path, tmp_path)
    write_gguf(path, raw, architecture="mamba")
    assert "'mamba' is not supported; supported: llama" in refusal(path, tmp_path)
    write_gguf(path, {n: a for n, a in raw.items() if n != "model.layers.1.mlp.up_proj.weight"})
    assert "has no tensor blk.1.ffn_up.weight" in refusal(path, tmp_path)
    write_gguf(path, raw | {"model.norm.weight": np.ones(HIDDEN + 32, dtype=np.float32)})
    assert "tensor output_norm.weight has the shape (96,) instead of (64,)" in refusal(path, tmp_path)
    write_gguf(path, raw, extra={"blk.0.attn_sinks.weight": np.ones(HEADS, dtype=np.float32)})
    assert "blk.0.attn_sinks.weight" in refusal(path, tmp_path)
    write_gguf(path, raw, extra={"blk.0.attn_q.bias": np.ones(HIDDEN, dtype=np.float32)})
    assert "has no tensor blk.0.attn_k.bias" in refusal(path, tmp_path)


def test_an_unknown_tensor_format_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_weights())
    data = bytearray(path.read_bytes())
    name = b"output_norm.weight"
    kind_at = data.index(name) + len(name) + 4 + 8
    assert struct.unpack_from("<I", data, kind_at)[0] == Kind.F32
    struct.pack_into("<I", data, kind_at, 4711)
    path.write_bytes(data)
    assert "tensor output_norm.weight has the unknown format 4711" in refusal(path, tmp_path)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"architectures": ["Qwen9ForCausalLM"]}, "'Qwen9ForCausalLM' is not supported; supported: LlamaForCausalLM"),
        ({"architectures": None}, "the architecture of no name is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"attention_bias": True}, "has no tensor model.layers.0.self_attn.q_proj.bias"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes', neither true nor false"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config = "),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope scaling 'dynamic', which is not supported"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope scaling 'llama3' is incomplete: it has no factor"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": "4"}},
            "rope scaling 'linear' cannot be computed: factor is '4'",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": -4.0}}, "factor is -4.0, not a positive number"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 1.0}, "cannot be computed: "),
        ({"rope_scaling": ["yarn"]}, "its rope settings are ['yarn'], not an object"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "that differ from layer to layer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3 key-value heads evenly"),
        ({"num_attention_heads": "four"}, "num_heads is 'four'"),
        ({"num_hidden_layers": 4}, "has no tensor model.layers.3.input_layernorm.weight"),
        ({"num_hidden_layers": 2}, "model.layers.2."),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"eos_token_id": "end"}, "eos_token_id is 'end'"),
    ],
)
def test_hugging_face_configs_that_cannot_be_computed_are_refused(
    tmp_path: Path, config: dict[str, Any], sentence: str
) -> None:
    assert sentence in refusal(write_hf(tmp_path / "hf", tiny_weights(), config=config), tmp_path)


def test_broken_hugging_face_directories_are_refused(tmp_path: Path) -> None:
    good = write_hf(tmp_path / "good", tiny_weights(), num_shards=2)
    shard = "model-00002-of-00002.safetensors"

    def broken(name: str) -> Path:
        return Path(shutil.copytree(good, tmp_path / name))

    where = broken("no-shard")
    (where / shard).unlink()
    assert f"lacks the file {shard} that holds tensor" in refusal(where, tmp_path)
    where = broken("cut-shard")
    (where / shard).write_bytes((good / shard).read_bytes()[:-100])
    assert re.search(rf"{shard}: truncated: tensor \S+ ends at byte", refusal(where, tmp_path))
    where = broken("cut-header")
    (where / shard).write_bytes((good / shard).read_bytes()[:50])
    assert f"{shard} is not a safetensors file, or is truncated" in refusal(where, tmp_path)
    where = broken("noise")
    (where / shard).write_bytes(struct.pack("<Q", 8) + b"{broken}" * 9)
    assert f"{shard}: corrupt" in refusal(where, tmp_path)
    where = broken("wrong-index")
    index = where / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"] | {"model.norm.weight": shard, "nowhere": shard}
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert "has no tensor nowhere" in refusal(where, tmp_path)
    where = broken("no-config")
    (where / "config.json").unlink()
    assert "has no config.json" in refusal(where, tmp_path)
    where = broken("no-tokenizer")
    (where / "tokenizer.json").unlink()
    assert "no tokenizer.json" in refusal(where, tmp_path)
    where = broken("no-weights")
    for file in (*where.glob("*.safetensors"), where / "model.safetensors.index.json"):
        file.unlink()
    assert "has no *.safetensors file" in refusal(where, tmp_path)


def test_an_index_cannot_point_outside_its_directory(tmp_path: Path) -> None:
    write_hf(tmp_path / "other", tiny_weights())
    where = write_hf(tmp_path / "hf", tiny_weights(), num_shards=2)
    index = {"weight_map": {HF_NAMES.norm: "../other/model.safetensors"}}
    (where / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidModel, match="lacks the file"):
        HfDir(where)


def test_formats_that_cannot_be_widened_are_refused(tmp_path: Path) -> None:
    where = write_hf(tmp_path / "hf", tiny_weights(), dtype=torch.float8_e4m3fn)
    assert "has the format F8_E4M3, which cannot be read" in refusal(where, tmp_path)


def test_generation_config_decides_what_ends_a_text(tmp_path: Path) -> None:
    where = write_hf(tmp_path / "hf", tiny_weights())
    (where / "generation_config.json").write_text(json.dumps({"eos_token_id": EXTRA_EOS_ID}))
    assert prepare(str(where), tmp_path).config.eos_token_ids == (EXTRA_EOS_ID,)
