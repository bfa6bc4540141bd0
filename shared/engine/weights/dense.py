"""Dense decoders (grouped-query attention, gated MLP): the numbers and the tensor layout Llama and its kin share."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from shared.engine.weights.errors import InvalidModel
from shared.engine.weights.plan import PlannedTensor
from shared.engine.weights.source import TensorSource

N = TypeVar("N", bound=BaseModel)


class DenseNumbers(BaseModel):
    """The numbers of a dense decoder. tied: the output projection is the embedding."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    num_layers: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt = Field(multiple_of=2, le=1024)
    norm_eps: PositiveFloat
    rope_base: PositiveFloat
    tied: bool


def check_numbers(numbers: type[N], where: object, **values: object) -> N:
    """The numbers, or an InvalidModel that names the first wrong one."""
    try:
        return numbers.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise InvalidModel(f"{where}: {field} is {first['input']!r}: {first['msg']}") from error


@dataclass(frozen=True, slots=True)
class DenseNames:
    """Where a source keeps each tensor; `{i}` stands for the layer. lm_head is read only where weights are not tied."""

    embed: str
    norm: str
    lm_head: str
    input_norm: str
    q: str
    k: str
    v: str
    o: str
    post_norm: str
    gate: str
    up: str
    down: str


def _as_it_is(weight: np.ndarray, num_heads: int) -> np.ndarray:
    return weight


def plan_dense(
    source: TensorSource,
    names: DenseNames,
    numbers: DenseNumbers,
    inv_freq: np.ndarray,
    *,
    vocab_size: int,
    also_used: frozenset[str] = frozenset(),
    reorder_heads: Callable[[np.ndarray, int], np.ndarray] = _as_it_is,
) -> tuple[PlannedTensor, ...]:
    """Checks every tensor's presence and shape, and that the source has none we would silently leave out.

    inv_freq: [head_dim / 2] rotary frequencies. reorder_heads(weight, num_heads) undoes a source's own order of the
    rows of q and k. also_used: tensors the caller has dealt with.
    """
    used = set(also_used)

    def read(name: str, *shape: int) -> Callable[[], np.ndarray]:
        if source.shape(name) != shape:
            raise InvalidModel(f"{source}: tensor {name} has the shape {source.shape(name)} instead of {shape}")
        used.add(name)
        return lambda: source.read(name)

    def fused(*parts: Callable[[], np.ndarray]) -> Callable[[], np.ndarray]:
        return lambda: np.concatenate([part() for part in parts])

    def reordered(part: Callable[[], np.ndarray], num_heads: int) -> Callable[[], np.ndarray]:
        return lambda: reorder_heads(part(), num_heads)

    def layer(i: int) -> Iterator[PlannedTensor]:
        hidden, inner = numbers.hidden_size, numbers.intermediate_size
        q_rows, kv_rows = numbers.num_heads * numbers.head_dim, numbers.num_kv_heads * numbers.head_dim

        def at(name: str, *shape: int) -> Callable[[], np.ndarray]:
            return read(name.format(i=i), *shape)

        q = reordered(at(names.q, q_rows, hidden), numbers.num_heads)
        k = reordered(at(names.k, kv_rows, hidden), numbers.num_kv_heads)
        qkv = fused(q, k, at(names.v, kv_rows, hidden))
        gate_up = fused(at(names.gate, inner, hidden), at(names.up, inner, hidden))
        yield PlannedTensor(f"layers.{i}.input_norm", (hidden,), at(names.input_norm, hidden))
        yield PlannedTensor(f"layers.{i}.qkv", (q_rows + 2 * kv_rows, hidden), qkv)
        yield PlannedTensor(f"layers.{i}.o", (hidden, q_rows), at(names.o, hidden, q_rows))
        yield PlannedTensor(f"layers.{i}.post_norm", (hidden,), at(names.post_norm, hidden))
        yield PlannedTensor(f"layers.{i}.gate_up", (2 * inner, hidden), gate_up)
        yield PlannedTensor(f"layers.{i}.down", (hidden, inner), at(names.down, hidden, inner))

    table = (vocab_size, numbers.hidden_size)
    tensors = [
        PlannedTensor("rope_inv_freq", inv_freq.shape, lambda: inv_freq),
        PlannedTensor("embed", table, read(names.embed, *table)),
    ]
    for i in range(numbers.num_layers):
        tensors.extend(layer(i))
    tensors.append(PlannedTensor("norm", (numbers.hidden_size,), read(names.norm, numbers.hidden_size)))
    if not numbers.tied:
        tensors.append(PlannedTensor("lm_head", table, read(names.lm_head, *table)))
    left = sorted(source.names - used)
    if left:
        raise InvalidModel(f"{source}: a model of this kind has no tensor {left[0]} ({len(left)} such tensors)")
    return tuple(tensors)


def rope_inv_freq(base: float, head_dim: int) -> np.ndarray:
    """[head_dim / 2] float32: how far each pair of a head turns per position."""
    return (1.0 / base ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)).astype(np.float32)
