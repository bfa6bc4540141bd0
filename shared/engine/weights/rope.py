"""Rotary frequencies and the ways to stretch them, by the formulas of transformers (`modeling_rope_utils`)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shared.engine.weights.errors import InvalidModel

DEFAULT_BASE = 10000.0
_FAST_TURNS, _SLOW_TURNS = 32.0, 1.0


@dataclass(frozen=True, slots=True)
class Rope:
    """inv_freq: [head_dim / 2] float32, how far each pair of a head turns per position. attention_factor: cosines and
    sines are multiplied by it. reach: positions the stretching is made for, 0 where it does not say."""

    inv_freq: np.ndarray
    attention_factor: float = 1.0
    reach: int = 0


def plain_rope(base: float, head_dim: int) -> Rope:
    return Rope((1.0 / base ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)).astype(np.float32))


def stretched_rope(where: object, settings: Mapping[str, Any], base: float, head_dim: int, max_len: int) -> Rope:
    """settings: as `rope_scaling` or `rope_parameters` in a config.json. max_len: the model's declared context, the
    default of `original_max_position_embeddings`. InvalidModel where the kind is unknown or its numbers make no sense.
    """
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind == "default":
        return plain_rope(base, head_dim)
    stretch = _KINDS.get(kind) if isinstance(kind, str) else None
    if stretch is None:
        known = ", ".join(_KINDS)
        raise InvalidModel(f"{where} asks for rope scaling {kind!r}, which is not supported; supported: {known}")
    try:
        with np.errstate(all="ignore"):
            rope = stretch(settings, base, head_dim, max_len)
    except KeyError as error:
        raise InvalidModel(f"{where}: rope scaling {kind!r} is incomplete: it has no {error.args[0]}") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        raise InvalidModel(f"{where}: rope scaling {kind!r} cannot be computed: {error}") from error
    if not (np.isfinite(rope.inv_freq).all() and math.isfinite(rope.attention_factor) and rope.attention_factor > 0):
        raise InvalidModel(f"{where}: rope scaling {kind!r} gives no usable frequencies from {dict(settings)}")
    return rope


def _linear(settings: Mapping[str, Any], base: float, head_dim: int, max_len: int) -> Rope:
    return Rope(plain_rope(base, head_dim).inv_freq / np.float32(_positive(settings, "factor")))


def _llama3(settings: Mapping[str, Any], base: float, head_dim: int, max_len: int) -> Rope:
    """Slow turns are divided by `factor`, fast ones stay, those between are blended."""
    inv_freq = plain_rope(base, head_dim).inv_freq
    factor, low, high = (_positive(settings, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = _original_len(settings, max_len) * inv_freq.astype(np.float64) / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return Rope(np.asarray(((1 - share) / factor + share) * inv_freq, dtype=np.float32))


def _yarn(settings: Mapping[str, Any], base: float, head_dim: int, max_len: int) -> Rope:
    """Pairs that turn often within the original context stay, slow ones are divided by `factor`, and a ramp blends
    those between; attention is sharpened to make up for it."""
    original = _original_len(settings, max_len)
    factor = max_len / original if settings["factor"] is None else _positive(settings, "factor")

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(base))

    low = pair_that_turns(_positive(settings, "beta_fast", _FAST_TURNS))
    high = pair_that_turns(_positive(settings, "beta_slow", _SLOW_TURNS))
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / ((high - low) or 0.001), 0.0, 1.0)
    inv_freq = 1.0 / base ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    blended = inv_freq / factor * ramp + inv_freq * (1 - ramp)
    return Rope(blended.astype(np.float32), _yarn_attention_factor(settings, factor), int(original * factor))


def _yarn_attention_factor(settings: Mapping[str, Any], factor: float) -> float:
    if settings.get("attention_factor") is not None:
        return _positive(settings, "attention_factor")

    def sharpened(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if settings.get("mscale") and settings.get("mscale_all_dim"):
        return sharpened(_positive(settings, "mscale")) / sharpened(_positive(settings, "mscale_all_dim"))
    return sharpened(1.0)


def _original_len(settings: Mapping[str, Any], max_len: int) -> float:
    return _positive(settings, "original_max_position_embeddings", max_len)


def _positive(settings: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """The setting, or its default where it is absent, null or 0. ValueError where it is no positive number; KeyError
    where there is no default either."""
    value = settings[key] if default is None else settings.get(key) or default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{key} is {value!r}, not a positive number")
    return float(value)


_KINDS: Mapping[str, Callable[[Mapping[str, Any], float, int, int], Rope]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
