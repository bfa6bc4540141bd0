"""How Hugging Face directories describe dense decoders: the same tensor names and settings for every family."""

from collections.abc import Mapping
from typing import Any

from shared.engine.weights.dense import DenseNames, DenseNumbers, check_numbers, plan_dense
from shared.engine.weights.errors import InvalidModel
from shared.engine.weights.hf_dir import HfDir
from shared.engine.weights.plan import ModelPlan, optional_number, whole_number
from shared.engine.weights.rope import DEFAULT_BASE, stretched_rope

HF_NAMES = DenseNames(
    embed="model.embed_tokens.weight",
    norm="model.norm.weight",
    lm_head="lm_head.weight",
    input_norm="model.layers.{i}.input_layernorm.weight",
    q="model.layers.{i}.self_attn.q_proj.weight",
    k="model.layers.{i}.self_attn.k_proj.weight",
    v="model.layers.{i}.self_attn.v_proj.weight",
    o="model.layers.{i}.self_attn.o_proj.weight",
    post_norm="model.layers.{i}.post_attention_layernorm.weight",
    gate="model.layers.{i}.mlp.gate_proj.weight",
    up="model.layers.{i}.mlp.up_proj.weight",
    down="model.layers.{i}.mlp.down_proj.weight",
    q_norm="model.layers.{i}.self_attn.q_norm.weight",
    k_norm="model.layers.{i}.self_attn.k_norm.weight",
)
_MAX_LEN_KEY = "max_position_embeddings"


def plan_dense_hf(directory: HfDir, architecture: str, config: Mapping[str, Any], **parts: bool) -> ModelPlan:
    """config: the directory's, completed by the family's defaults. parts: what the family adds to a plain decoder, as
    DenseNumbers names it. Raises InvalidModel where the directory cannot be computed exactly."""
    for key, allowed in (("hidden_act", ("silu", None)), ("quantization_config", (None,))):
        if config.get(key) not in allowed:
            raise InvalidModel(f"{directory}: {key} = {config[key]!r} is not supported")
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    max_len = whole_number(directory, _MAX_LEN_KEY, config.get(_MAX_LEN_KEY), 1)
    settings = _rope_settings(directory, config)
    numbers = check_numbers(
        DenseNumbers,
        directory,
        num_layers=config.get("num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=config.get("intermediate_size"),
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim_of(directory, config.get("head_dim"), hidden, heads),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_base=settings.get("rope_theta") or config.get("rope_theta") or DEFAULT_BASE,
        tied=config.get("tie_word_embeddings", False),
        **parts,
    )
    rope = stretched_rope(directory, settings, numbers.rope_base, numbers.head_dim, max_len)
    numbers = numbers.model_copy(update={"rope_attention_factor": rope.attention_factor})
    vocab_size = directory.shape(HF_NAMES.embed)[0]
    # A tied model may still carry its head, and old checkpoints carry the rotary table: both say nothing new.
    also_used = frozenset(
        name
        for name in directory.names
        if name.endswith("rotary_emb.inv_freq") or (numbers.tied and name == HF_NAMES.lm_head)
    )
    return ModelPlan(
        architecture=architecture,
        vocab_size=vocab_size,
        max_model_len=max(max_len, rope.reach),
        eos_token_ids=directory.eos_token_ids(),
        bos_token_id=optional_number(directory, "bos_token_id", config.get("bos_token_id")),
        numbers=numbers.model_dump(exclude_defaults=True),
        tensors=plan_dense(directory, HF_NAMES, numbers, rope.inv_freq, vocab_size=vocab_size, also_used=also_used),
    )


def refuse_window(where: object, window: object, max_len: object) -> None:
    """Sliding windows are not computed; one that covers the whole context changes nothing. None: there is none."""
    if window is None:
        return
    window = whole_number(where, "sliding_window", window, 1)
    if isinstance(max_len, int) and window < max_len:
        raise InvalidModel(
            f"{where}: sliding_window = {window} is smaller than the context of {max_len} positions, and attention "
            f"over a window is not supported; a copy whose context is set to {window} can be served"
        )


def head_dim_of(where: object, said: Any, hidden: Any, heads: Any) -> Any:
    if said is not None:
        return said
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1 or hidden % heads:
        raise InvalidModel(f"{where}: {heads!r} heads do not divide a hidden size of {hidden!r}")
    return hidden // heads


def _rope_settings(directory: HfDir, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """`rope_scaling` of transformers 4 or `rope_parameters` of transformers 5, as transformers chooses."""
    settings = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(settings, Mapping):
        raise InvalidModel(f"{directory}: its rope settings are {settings!r}, not an object")
    if any(isinstance(value, Mapping) for value in settings.values()):
        raise InvalidModel(f"{directory}: rope settings that differ from layer to layer are not supported")
    partial = settings.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise InvalidModel(f"{directory}: partial_rotary_factor = {partial!r} is not supported")
    original = config.get("original_max_position_embeddings")
    return settings if original is None else {**settings, "original_max_position_embeddings": original}
