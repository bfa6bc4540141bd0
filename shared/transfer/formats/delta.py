"""`delta`: a few bits a number, for links so slow that nothing else arrives in time, in the manner of CacheGen.

Tokens form groups, each with a reference row; of every token only its difference from that row travels, in steps of a
size for each layer, segment and channel, the coarser the later the layer: early layers' errors pass through all others.
The reference is the group's first token, the anchor, or, where differences from it spread wider than the numbers
themselves (as they do in the default model), the mean of all the block's tokens. Whole steps are entropy-coded
(kernels/wire/rans.py) with one table of frequencies for each third of the layers, since steps are in units of spread.

    group  layers in each third  table of references, tables of thirds  sizes and streams of the same
    scales of references, steps
"""

import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np

from kernels.wire import rans
from shared.state.components import StateComponent
from shared.transfer.formats.block import Buffer, Damaged, Reader, check_values, is_lossy_input, seal, unseal

STEPS = (0.25, 0.375, 0.5)
"""A step in spreads of the differences (_spread_of), for the first, second and last third of the layers."""
GROUP_TOKENS = 16
_THIRDS = len(STEPS)
_SMALLEST = 1e-30
_MOST = 127
_HEAD = struct.Struct("<H3H")
_RANGE = struct.Struct("<BB")
_SIZE = struct.Struct("<I")


class Delta:
    """At most half a step is lost; no step exceeds 1/127 of the largest difference by more than 1 %, or `STEPS`. A
    channel that holds NaN, infinity or more than 1e18 becomes NaN in every token of the block, at least."""

    name: ClassVar[str] = "delta"
    number: ClassVar[int] = 6
    version: ClassVar[int] = 1

    def takes(self, component: StateComponent) -> bool:
        return is_lossy_input(component)

    def encode(self, values: np.ndarray, component: StateComponent, *, first_layer: int = 0) -> bytes:
        check_values(values, component)
        if not self.takes(component):
            raise ValueError(f"component {component.name} does not travel as {self.name}")
        tokens = _by_token(values)
        with np.errstate(invalid="ignore", over="ignore"):
            return self._encode(values, tokens, _third_of_layers(first_layer, len(values), component.num_layers))

    def _encode(self, values: np.ndarray, tokens: np.ndarray, third: np.ndarray) -> bytes:
        group, means = _group_of(tokens)
        references, scales = _quantized(means if group == 0 else tokens[:, :, ::group])
        differences = tokens - _spread(_restored(references, scales), group, tokens.shape[2])
        steps = _steps(differences, third)
        coded = differences / _wide(steps)[:, :, None]
        symbols = np.nan_to_num(np.rint(coded) + 128, nan=0, posinf=0, neginf=0).astype(np.uint8)
        streams = [references, *(symbols[third == k] for k in range(_THIRDS))]
        tables = [rans.frequencies(stream) for stream in streams]
        packed = [rans.encode(s.reshape(-1), freq) for s, freq in zip(streams, tables, strict=True)]
        parts = [_HEAD.pack(group, *(int((third == k).sum()) for k in range(_THIRDS)))]
        parts += [_packed_table(freq) for freq in tables]
        for stream in packed:
            parts += (_SIZE.pack(len(stream)), stream)
        parts += (scales.tobytes(), steps.tobytes())
        return seal(self.number, self.version, values, b"".join(parts))

    def decode(self, data: Buffer, component: StateComponent, out: np.ndarray) -> None:
        reader = Reader(unseal(self.number, self.version, data, component, out))
        parts = _parse(reader, out.shape)
        layers, units, segments, rows, width = out.shape
        with np.errstate(invalid="ignore", over="ignore"):
            base = _restored(parts.references, parts.scales)
            for layer in range(layers):
                tokens = parts.symbols[layer].astype(np.float32) - 128
                tokens *= _wide(parts.steps[layer])[:, None]
                tokens += _spread(base[layer : layer + 1], parts.group, units * rows)[0]
                out[layer] = tokens.reshape(segments, units, rows, width).swapaxes(0, 1)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a payload holds; bytes as 0 … 255 that stand for -128 … 127. group: 0 where the block is one group around
    its mean."""

    group: int
    references: np.ndarray  # uint8 [layers, segments, groups, width]
    scales: np.ndarray  # float32 [layers, segments, groups]
    steps: np.ndarray  # uint16 [layers, segments, width]: see _wide
    symbols: np.ndarray  # uint8 [layers, segments, tokens, width]


def _parse(reader: Reader, shape: tuple[int, ...]) -> _Parts:
    layers, units, segments, rows, width = shape
    group, *thirds = reader.fields(_HEAD)
    if sum(thirds) != layers:
        raise Damaged("a block's thirds are not its layers")
    num_groups = -(-(units * rows) // group) if group else 1
    references = np.empty((layers, segments, num_groups, width), dtype=np.uint8)
    symbols = np.empty((layers, segments, units * rows, width), dtype=np.uint8)
    cuts = np.cumsum((0, *thirds))
    targets = [references, *(symbols[begin:end] for begin, end in pairwise(cuts))]
    tables = [_read_table(reader) for _ in targets]
    for target, freq in zip(targets, tables, strict=True):
        stream = reader.array("u1", reader.fields(_SIZE))
        if not rans.decode(stream, freq, target.reshape(-1)):
            raise Damaged("an entropy-coded stream cannot be read")
    scales = reader.array("<f4", (layers, segments, num_groups))
    steps = reader.array("<u2", (layers, segments, width))
    reader.end()
    return _Parts(group, references, scales, steps, symbols)


def _by_token(values: np.ndarray) -> np.ndarray:
    """float32 [layers, segments, tokens, width]."""
    layers, units, segments, rows, width = values.shape
    by_segment = values.astype(np.float32).swapaxes(1, 2)
    return by_segment.reshape(layers, segments, units * rows, width)


def _third_of_layers(first: int, count: int, of: int) -> np.ndarray:
    if first < 0 or first + count > of:
        raise ValueError(f"{count} layers from {first} on are more than {of}")
    return np.arange(first, first + count) * _THIRDS // of


def _group_of(tokens: np.ndarray) -> tuple[int, np.ndarray]:
    """Tokens in a group, 0 for the mean of all; and the means [layers, segments, 1, width]."""
    means = tokens.mean(axis=2, keepdims=True)
    num_tokens = tokens.shape[2]
    anchors = _spread(tokens[:, :, ::GROUP_TOKENS], GROUP_TOKENS, num_tokens)
    around_anchors, around_means = (_spread_bits(tokens - base) for base in (anchors, means))
    # Half of what a number of 8 bits may cost, a number for each token of a group.
    return (GROUP_TOKENS if around_anchors + 4 / GROUP_TOKENS < around_means else 0), means


def _spread_bits(differences: np.ndarray) -> float:
    """How many bits a number their spread costs, up to a constant."""
    spread = _spread_of(np.abs(differences))
    known = spread[np.isfinite(spread)]
    return float(np.log2(np.maximum(known, _SMALLEST)).mean()) if known.size else 0.0


def _spread_of(sizes: np.ndarray) -> np.ndarray:
    """A standard deviation, of normal numbers, by their mean size: a prompt's first tokens are often far from all
    others, and their squares would make the steps of all too coarse."""
    spread: np.ndarray = sizes.mean(axis=2) * np.float32(1.2533)
    return spread


def _quantized(references: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bytes, and the scale of each row."""
    top = np.abs(references).max(axis=-1)
    scales = np.where(np.isfinite(top), np.maximum(top, _SMALLEST) / _MOST, np.nan).astype("<f4")
    whole = np.rint(references / scales[..., None]) + 128
    return np.nan_to_num(whole, nan=0).astype(np.uint8), scales


def _restored(references: np.ndarray, scales: np.ndarray) -> np.ndarray:
    restored: np.ndarray = (references.astype(np.float32) - 128) * scales[..., None]
    return restored


def _spread(references: np.ndarray, group: int, num_tokens: int) -> np.ndarray:
    """Each token's reference; axis 2 may stay 1 where all share it."""
    return np.repeat(references, group, axis=2)[:, :, :num_tokens] if group else references


def _steps(differences: np.ndarray, third: np.ndarray) -> np.ndarray:
    """The upper 16 bits of float32 steps [layers, segments, width], rounded up so that `_MOST` steps reach all."""
    sizes = np.abs(differences)
    wanted = _spread_of(sizes) * np.array(STEPS, dtype=np.float32)[third][:, None, None]
    needed = sizes.max(axis=2) / _MOST
    steps = np.maximum(np.maximum(wanted, needed), np.float32(_SMALLEST))
    steps[~np.isfinite(steps)] = np.nan
    upper: np.ndarray = ((steps.view(np.uint32) >> 16) + 1).astype("<u2")
    return upper


def _wide(steps: np.ndarray) -> np.ndarray:
    wide: np.ndarray = (steps.astype(np.uint32) << 16).view(np.float32)
    return wide


def _packed_table(freq: np.ndarray) -> bytes:
    """From the first byte that comes to the last."""
    used = np.flatnonzero(freq)
    first, last = int(used[0]), int(used[-1])
    return _RANGE.pack(first, last) + freq[first : last + 1].astype("<u2").tobytes()


def _read_table(reader: Reader) -> np.ndarray:
    first, last = reader.fields(_RANGE)
    if last < first:
        raise Damaged("a table of frequencies ends before it begins")
    freq = np.zeros(256, dtype=np.int32)
    freq[first : last + 1] = reader.array("<u2", (last + 1 - first,))
    return freq
