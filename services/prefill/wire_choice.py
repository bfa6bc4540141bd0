"""Which wire format a prompt's state leaves in."""

from shared.protocol.messages import OnWire, Prefill
from shared.protocol.reports import LinkAddress
from shared.runtime.counters import Counters
from shared.state.layout import PoolLayout
from shared.transfer.formats.agree import agree, common, ran
from shared.transfer.formats.choice import choose, options
from shared.transfer.link import Link

_NEWEST = 0.3
"""What the newest prompt weighs in the pace."""
_LEAST_TOKENS = 64


class WireChoice:
    """Knows this worker's pace, tokens_per_s, and counts what was asked for and what ran."""

    def __init__(self, layout: PoolLayout, link: Link, counters: Counters) -> None:
        self._layout, self._link, self._counters = layout, link, counters
        self.tokens_per_s: float | None = None

    def choose(self, order: Prefill, peer: LinkAddress, cached_len: int = 0, held_len: int = 0) -> str:
        """A format that the request accepts and both sides have. Under `auto` an exact one until both the link and our
        own pace were measured, since nothing says then that the client would wait for the bytes. cached_len: positions
        that need not be computed; held_len: that need not be sent."""
        precision, ours = order.kv_precision, self._link.address.formats
        self._counters.add(f"kv_precision_{precision}")
        if precision != "auto":
            agreed = agree(precision, ours, peer.formats)
            self._counters.add("wire_format_fallbacks", int(agreed.instead))
            return agreed.name
        rate, pace = self._link.rate(peer), self.tokens_per_s
        if rate is None or pace is None:
            return agree("lossless", ours, peer.formats).name
        sent, computed = max(1, len(order.prompt) - held_len), len(order.prompt) - cached_len
        offers = options(common(precision, ours, peer.formats), self._layout.components, sent)
        return choose(offers, rate, computed / pace)

    def computed(self, num_tokens: int, spent_s: float) -> None:
        """A prompt is computed. Of short ones the fixed costs would pass for a pace."""
        if spent_s > 0 and num_tokens >= _LEAST_TOKENS:
            pace, known = num_tokens / spent_s, self.tokens_per_s
            self.tokens_per_s = pace if known is None else known + _NEWEST * (pace - known)

    def ran(self, on_wire: tuple[OnWire, ...]) -> None:
        if on_wire:
            self._counters.add(f"wire_format_{ran(on_wire)}")
