"""Which format `auto` takes: a smaller one only where the bytes are what the client waits for."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shared.state.components import IndexKind, StateComponent
from shared.transfer.formats.catalog import LOSSINESS, travels_as

_WORTH = 0.9
"""A lossier format must end in less than this share of the time: below that its loss buys nothing that is felt."""


@dataclass(frozen=True, slots=True)
class Option:
    """A format for one prompt's state. wire_bytes: as it travels. encode_s, decode_s: as measured on this machine, 0
    where nothing is done."""

    name: str
    wire_bytes: float
    encode_s: float = 0.0
    decode_s: float = 0.0

    def transfer_s(self, link_bytes_per_s: float) -> float:
        """Encoding, link and decoding work side by side on different chunks: the slowest of them decides."""
        wire_s = self.wire_bytes / link_bytes_per_s if link_bytes_per_s > 0 else math.inf
        return max(self.encode_s, wire_s, self.decode_s)


@dataclass(frozen=True, slots=True)
class _Cost:
    """bits: of a number on the wire. encode, decode: MiB of rows a second. For float32 rows, and for float16 rows; of
    blocks of the default model's shape, on one core."""

    bits: tuple[float, float]
    encode: tuple[float, float] = (math.inf, math.inf)
    decode: tuple[float, float] = (math.inf, math.inf)


_MIB = 1 << 20
_DTYPES = ("float32", "float16")
_COSTS = {
    "raw": _Cost((32, 16)),
    "lossless": _Cost((27.1, 13.8), (540, 780), (1100, 1100)),
    "fp16": _Cost((16, 16), (720, 720), (2000, 2000)),
    "int8": _Cost((8.5, 8.5), (1700, 500), (4000, 480)),
    "fp8": _Cost((8.5, 8.5), (820, 300), (1600, 340)),
    "delta": _Cost((3.6, 3.6), (200, 97), (480, 170)),
}


def options(names: Iterable[str], components: Sequence[StateComponent], num_tokens: int) -> list[Option]:
    """What the state of a prompt would cost in each format."""
    return [_option(name, components, num_tokens) for name in names]


def _option(name: str, components: Sequence[StateComponent], num_tokens: int) -> Option:
    wire_bytes = encode_s = decode_s = 0.0
    for component in components:
        rows = num_tokens if component.index is IndexKind.PAGE else component.rows_in_last_unit(num_tokens)
        num_bytes = rows * component.row_bytes * component.num_layers
        if component.dtype not in _DTYPES:
            wire_bytes += num_bytes  # other numbers are few, and hardly get smaller
            continue
        cost, which = _COSTS[travels_as(name, component)], _DTYPES.index(component.dtype)
        wire_bytes += num_bytes * cost.bits[which] / (32, 16)[which]
        encode_s += num_bytes / (cost.encode[which] * _MIB)
        decode_s += num_bytes / (cost.decode[which] * _MIB)
    return Option(name, wire_bytes, encode_s, decode_s)


def choose(options: Sequence[Option], link_bytes_per_s: float, prefill_s: float) -> str:
    """The name of one option. The fastest exact format where it ends within the prefill it overlaps with; else the
    least lossy that does, or that leaves nothing noticeable to gain by a lossier one. Only what is among the options,
    at least one, is taken."""

    def exposed_s(option: Option) -> float:
        return max(0.0, option.transfer_s(link_bytes_per_s) - prefill_s)

    ranked = sorted(options, key=lambda option: (LOSSINESS[option.name], option.transfer_s(link_bytes_per_s)))
    best = ranked[0]
    for option in ranked[1:]:
        if LOSSINESS[option.name] > LOSSINESS[best.name] and exposed_s(option) < _WORTH * exposed_s(best):
            best = option
    return best.name


def break_even_bytes_per_s(option: Option, raw_bytes: float) -> float:
    """The link rate below which the option ends sooner than raw bytes do; 0 where it never does."""
    if option.wire_bytes >= raw_bytes:
        return 0.0
    coding_s = max(option.encode_s, option.decode_s)
    return raw_bytes / coding_s if coding_s > 0 else math.inf
