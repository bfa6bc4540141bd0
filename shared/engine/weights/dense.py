"""Dense decoders (grouped-query attention, gated MLP): the numbers and the tensor layout Llama and its kin share."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, ValidationInfo
from pydantic import field_validator as validator

from shared.engine.weights.errors import InvalidModel
from shared.engine.weights.plan import PlannedTensor
from shared.engine.weights.source import TensorSource

N = TypeVar("N", bound=BaseModel)
Build = Callable[[], np.ndarray]
ReorderHeads = Callable[[np.ndarray, int], np.ndarray]


class DenseNumbers(BaseModel):
    """The numbers of a dense decoder. tied: the output projection is the embedding. qk_norm: each head of q and k is
    normed before it is turned. rope_attention_factor: cosines and sines are multiplied by it."""

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
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope_attention_factor: PositiveFloat = 1.0

    @validator("num_kv_heads")
    @classmethod
    def _heads_share_evenly(cls, value: int, info: ValidationInfo) -> int:
        heads = info.data.get("num_heads", value)
        if heads % value:
            raise ValueError(f"{heads} query heads cannot share {value} key-value heads evenly")
        return value


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
    """Where a source keeps each tensor; `{i}` stands for the layer, and a bias lies beside its weight. What the
    numbers say the model lacks (lm_head where it is tied, norms of q and k) is never looked for."""

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
    q_norm: str
    k_norm: str


def bias_of(weight: str) -> str:
    return weight.removesuffix(".weight") + ".bias"


def as_it_is(weight: np.ndarray, num_heads: int) -> np.ndarray:
    return weight


def plan_dense(
    source: TensorSource,
    names: DenseNames,
    numbers: DenseNumbers,
    inv_freq: np.ndarray,
    *,
    vocab_size: int,
    also_used: frozenset[str] = frozenset(),
    reorder_heads: ReorderHeads = as_it_is,
) -> tuple[PlannedTensor, ...]:
    """Checks every tensor's presence and shape, and that the source has none we would silently leave out.

    inv_freq: [head_dim / 2] rotary frequencies. reorder_heads(tensor, num_heads) undoes a source's own order of the
    rows of q and k. also_used: tensors the caller has dealt with.
    """
    read = _Reader(source, set(also_used))
    table = (vocab_size, numbers.hidden_size)
    tensors = [
        PlannedTensor("rope_inv_freq", inv_freq.shape, lambda: inv_freq),
        PlannedTensor("embed", table, read(names.embed, *table)),
    ]
    for i in range(numbers.num_layers):
        for name, shape, build in _Layer(read, names, numbers, reorder_heads, i).tensors():
            tensors.append(PlannedTensor(f"layers.{i}.{name}", shape, build))
    tensors.append(PlannedTensor("norm", (numbers.hidden_size,), read(names.norm, numbers.hidden_size)))
    if not numbers.tied:
        tensors.append(PlannedTensor("lm_head", table, read(names.lm_head, *table)))
    left = sorted(source.names - read.used)
    if left:
        raise InvalidModel(f"{source}: a model of this kind has no tensor {left[0]} ({len(left)} such tensors)")
    return tuple(tensors)


class _Reader:
    """Plans reads: each tensor's presence and shape are checked at once, its content is read later."""

    def __init__(self, source: TensorSource, used: set[str]) -> None:
        self._source, self.used = source, used

    def __call__(self, name: str, *shape: int) -> Build:
        found = self._source.shape(name)
        if found != shape:
            raise InvalidModel(f"{self._source}: tensor {name} has the shape {found} instead of {shape}")
        self.used.add(name)
        return lambda: self._source.read(name)


class _Layer:
    """The tensors of one layer as the workers want them: what is multiplied by the same input lies together."""

    def __init__(self, read: _Reader, names: DenseNames, numbers: DenseNumbers, reorder: ReorderHeads, i: int) -> None:
        self._read, self._names, self._numbers, self._reorder, self._i = read, names, numbers, reorder, i

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], Build]]:
        n, names = self._numbers, self._names
        hidden, inner = n.hidden_size, n.intermediate_size
        q_rows, qkv_rows = n.num_heads * n.head_dim, (n.num_heads + 2 * n.num_kv_heads) * n.head_dim
        yield "input_norm", (hidden,), self._at(names.input_norm, hidden)
        yield "qkv", (qkv_rows, hidden), self._qkv((names.q, names.k, names.v), hidden)
        if n.qkv_bias:
            biases = (bias_of(names.q), bias_of(names.k), bias_of(names.v))
            yield "qkv_bias", (qkv_rows,), self._qkv(biases)
        if n.qk_norm:
            yield "q_norm", (n.head_dim,), self._at(names.q_norm, n.head_dim)
            yield "k_norm", (n.head_dim,), self._at(names.k_norm, n.head_dim)
        yield "o", (hidden, q_rows), self._at(names.o, hidden, q_rows)
        if n.o_bias:
            yield "o_bias", (hidden,), self._at(bias_of(names.o), hidden)
        yield "post_norm", (hidden,), self._at(names.post_norm, hidden)
        gate_up = _fused(self._at(names.gate, inner, hidden), self._at(names.up, inner, hidden))
        yield "gate_up", (2 * inner, hidden), gate_up
        yield "down", (hidden, inner), self._at(names.down, hidden, inner)
        if n.mlp_bias:
            biases_up = _fused(self._at(bias_of(names.gate), inner), self._at(bias_of(names.up), inner))
            yield "gate_up_bias", (2 * inner,), biases_up
            yield "down_bias", (hidden,), self._at(bias_of(names.down), hidden)

    def _qkv(self, names: tuple[str, str, str], *columns: int) -> Build:
        n = self._numbers
        heads = (n.num_heads, n.num_kv_heads, n.num_kv_heads)
        q, k, v = (self._at(name, m * n.head_dim, *columns) for name, m in zip(names, heads, strict=True))
        return _fused(lambda: self._reorder(q(), n.num_heads), lambda: self._reorder(k(), n.num_kv_heads), v)

    def _at(self, name: str, *shape: int) -> Build:
        return self._read(name.format(i=self._i), *shape)


def _fused(*parts: Build) -> Build:
    return lambda: np.concatenate([part() for part in parts])
