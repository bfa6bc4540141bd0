"""What a model family makes of a source: its numbers, and how to build each tensor of the final layout."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import JsonValue

from shared.engine.weights.errors import InvalidModel


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor as the workers map it. build() reads the source and returns float32 of `shape`."""

    name: str
    shape: tuple[int, ...]
    build: Callable[[], np.ndarray]


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """Everything is checked against the source by now: a plan that exists can be built.

    numbers: what the family's model class needs, as it goes into model.json. gguf_fields: metadata that the source was
    read with, where it has any; reading it again takes seconds.
    """

    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    numbers: dict[str, JsonValue]
    tensors: tuple[PlannedTensor, ...]
    gguf_fields: Mapping[str, Any] | None = None


def whole_number(where: object, key: str, value: object, least: int = 0) -> int:
    """The value of a setting that must be an integer of at least `least`; InvalidModel names it otherwise."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidModel(f"{where}: {key} is {value!r}, not a whole number of at least {least}")
    return value


def said(where: object, config: Mapping[str, Any], key: str) -> bool:
    """Whether a switch is on; absent and null mean off. InvalidModel names what is no switch."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise InvalidModel(f"{where}: {key} is {value!r}, neither true nor false")
    return bool(value)


def optional_number(where: object, key: str, value: object) -> int | None:
    return None if value is None else whole_number(where, key, value)
