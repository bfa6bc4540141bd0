"""Which format `auto` takes: a smaller one only where the bytes are what the client waits for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shared.transfer.formats.catalog import LOSSINESS

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
