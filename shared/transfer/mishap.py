"""What may go wrong with a transfer of the fake link, and who decides."""

from collections.abc import Callable
from dataclasses import dataclass

from shared.runtime.errors import TransferError
from shared.transfer.link import Piece, TicketKey


@dataclass(frozen=True, slots=True)
class Mishap:
    """What happens to one transfer. delay_s: before it is let in. layer_delay_s: before each layer is written.
    lost: it is let in and then nothing comes, until it is fenced or forgotten. corrupt: the first byte written is
    spoiled. error: it fails with this after it was let in. linger_s: once stopped it still writes the layer it is at,
    so much later."""

    delay_s: float = 0.0
    layer_delay_s: float = 0.0
    lost: bool = False
    corrupt: bool = False
    error: TransferError | None = None
    linger_s: float = 0.0


Policy = Callable[[TicketKey, tuple[Piece, ...]], Mishap]


def no_mishap(key: TicketKey, pieces: tuple[Piece, ...]) -> Mishap:
    return Mishap()
