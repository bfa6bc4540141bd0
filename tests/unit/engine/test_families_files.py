"""How families are told apart and read: old and new configs, GGUF files, windows, and what is refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest

from shared.engine.weights.catalog import PreparedModel, prepare
from shared.engine.weights.errors import InvalidModel
from shared.engine.weights.families import plan_source
from shared.text.prepare import write_text_files
from tests.support_families import CONTEXT, build, write_gguf, write_hf

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def same_model(one: PreparedModel, other: PreparedModel) -> bool:
    return one.config.weights_digest == other.config.weights_digest and one.config.numbers == other.config.numbers


@pytest.mark.parametrize("rope", [YARN, LLAMA3, {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}])
def test_configs_of_transformers_4_and_5_say_the_same(tmp_path: Path, rope: Mapping[str, Any]) -> None:
    model = build("qwen2", rope_parameters=dict(rope))
    new = prepare(str(write_hf(model, tmp_path / "new")), tmp_path)
    scaling = {key: value for key, value in rope.items() if key not in ("rope_type", "rope_theta")}
    scaling["type"] = rope["rope_type"]
    theta = rope["rope_theta"]
    where = write_hf(model, tmp_path / "old", rope_parameters=None, rope_theta=theta, rope_scaling=scaling)
    assert same_model(prepare(str(where), tmp_path), new)
    plain = write_hf(model, tmp_path / "plain", rope_parameters=None, rope_theta=theta)
    assert not same_model(prepare(str(plain), tmp_path), new)


@pytest.mark.parametrize(
    ("family", "config", "fields"),
    [
        ("llama", {"attention_bias": True, "head_dim": 32}, {}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}, {"factor": 4.0}),
        ("mistral", {}, {}),
        ("qwen2", {"rope_parameters": YARN}, {"type": "yarn", "factor": 4.0, "original_context_length": 64}),
        ("qwen3", {"tie_word_embeddings": True, "head_dim": 32}, {"type": "none"}),
    ],
)
def test_gguf_and_hugging_face_give_the_same_model(
    tmp_path: Path, family: str, config: dict[str, Any], fields: dict[str, Any]
) -> None:
    model = build(family, **config)
    named = {f"rope.scaling.{key}": value for key, value in fields.items()}
    from_gguf = prepare(str(write_gguf(model, tmp_path / "model.gguf", **named)), tmp_path)
    from_hf = prepare(str(write_hf(model, tmp_path / "hf")), tmp_path)
    assert same_model(from_gguf, from_hf)
    assert from_gguf.config.max_model_len == from_hf.config.max_model_len == CONTEXT
    assert from_gguf.config.architecture == {"mistral": "llama"}.get(family, family)


def test_yarn_reaches_as_far_as_it_stretches(tmp_path: Path) -> None:
    """The models' own instructions are to add `rope_scaling` and leave max_position_embeddings as it is."""
    where = write_hf(build("qwen3", rope_parameters=YARN), tmp_path / "hf", max_position_embeddings=64)
    assert prepare(str(where), tmp_path).config.max_model_len == 256


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("mistral", {"sliding_window": CONTEXT}),
        ("mistral", {"sliding_window": 16, "max_position_embeddings": 16}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 16}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3, "layer_types": None}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 16, "layer_types": ["full_attention"] * 3}),
    ],
)
def test_windows_that_change_nothing_are_fine(tmp_path: Path, family: str, config: dict[str, Any]) -> None:
    plan_source(write_hf(build(family), tmp_path / "hf", **config))


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("mistral", {"sliding_window": 16}),
        ("mistral", {"sliding_window": None, "max_position_embeddings": 8192}),  # absent: transformers takes 4096
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2, "layer_types": None}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 16, "layer_types": ["sliding_attention"] * 3}),
    ],
)
def test_a_window_inside_the_context_is_refused(tmp_path: Path, family: str, config: dict[str, Any]) -> None:
    where = write_hf(build(family), tmp_path / "hf", **config)
    with pytest.raises(InvalidModel, match=r"sliding_window = (16|4096) is smaller than the context of (2048|8192)"):
        plan_source(where)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"attention.sliding_window": 16}, "sliding_window = 16 is smaller than the context of 2048"),
        ({"expert_count": 8}, "is a mixture of experts"),
        ({"rope.dimension_count": 8}, r"qwen3.rope.dimension_count = 8 with heads of 16"),
        ({"rope.scaling.type": "longrope"}, "rope scaling 'longrope', which is not supported"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": -2.0}, "rope scaling 'yarn' cannot be computed"),
        ({"rope.scaling.factor": 2.0, "rope.scaling.attn_factor": 1.5}, "rope.scaling.attn_factor is not supported"),
    ],
)
def test_gguf_files_that_cannot_be_computed_are_refused(tmp_path: Path, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidModel, match=sentence):
        plan_source(write_gguf(build("qwen3", max_position_embeddings=CONTEXT), tmp_path / "model.gguf", **fields))


def test_weights_of_the_same_model_under_another_name_are_left_alone(tmp_path: Path) -> None:
    """Mistral publishes its weights twice in one repository, in two formats."""
    where = write_hf(build("mistral"), tmp_path / "hf")
    before = prepare(str(where), tmp_path)
    (where / "consolidated.safetensors").write_bytes((where / "model.safetensors").read_bytes()[:-100])
    assert same_model(prepare(str(where), tmp_path), before)


def test_a_gguf_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_gguf(build("qwen2"), tmp_path / "model.gguf")
    write_text_files(source, tmp_path / "slow")

    def refuse(*_: object) -> None:
        raise AssertionError("the metadata was read already")

    monkeypatch.setattr(gguf, "GGUFReader", refuse)
    directory = prepare(str(source), tmp_path).directory
    for name in ("tokenizer.json", "text.json"):
        assert (directory / name).read_bytes() == (tmp_path / "slow" / name).read_bytes()


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{% for message in messages %}", "the model's chat template does not compile"),
        ("{{ messages[0].missing.deeper }}", "the model's chat template failed: "),
        ("{{ raise_exception('only in pairs') }}", "failed: only in pairs, on one message of a user"),
    ],
)
def test_a_template_that_no_chat_could_use_is_refused(tmp_path: Path, template: str, sentence: str) -> None:
    where = write_hf(build("llama"), tmp_path / "hf")
    (where / "chat_template.jinja").write_text(template)
    with pytest.raises(InvalidModel, match=sentence) as caught:
        prepare(str(where), tmp_path)
    assert str(where) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path for path in (tmp_path / "models").glob("*") if path.suffix != ".lock"] == []
