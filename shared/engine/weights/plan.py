"""What a model family makes of a source: its numbers, and how to build each tensor of the final layout."""

from collections.abc import Callable
from dataclasses import dataclass

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

    numbers: what the family's model class needs, as it goes into model.json.
    """

    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    numbers: dict[str, JsonValue]
    tensors: tuple[PlannedTensor, ...]


def whole_number(where: object, key: str, value: object, least: int = 0) -> int:
    """The value of a setting that must be an integer of at least `least`; InvalidModel names it otherwise."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidModel(f"{where}: {key} is {value!r}, not a whole number of at least {least}")
    return value


def optional_number(where: object, key: str, value: object) -> int | None:
    return None if value is None else whole_number(where, key, value)
