"""What of a ticket was moved: digests and rows of each logical unit and layer, and the receipt made of them.

Sender and receiver each keep one; equal ledgers give equal receipts however the units were cut into transfers.
"""

import numpy as np
import xxhash

from shared.state.components import IndexKind, StateComponent
from shared.transfer.digester import DIGEST_BYTES
from shared.transfer.link import ComponentReceipt, Piece, Receipt


def payload_bytes(component: StateComponent, num_units: int, rows_in_last: int, num_layers: int | None = None) -> int:
    """Bytes of the rows with state in `num_units` units, in so many layers (None: all)."""
    rows = max(0, num_units - 1) * component.unit_tokens + (rows_in_last if num_units else 0)
    return rows * component.row_bytes * (component.num_layers if num_layers is None else num_layers)


def bytes_of(piece: Piece, component: StateComponent) -> int:
    """Those of its rows with state; also for a piece that names layers which do not exist."""
    layers = piece.layers(component.num_layers)
    num_layers = max(0, layers.stop - layers.start)  # `len` knows no number that large
    return payload_bytes(component, len(piece.units), piece.rows_in_last, num_layers)


def state_bytes(component: StateComponent, num_tokens: int, held_len: int = 0) -> int:
    """Bytes of all the state that so many positions leave, without the pages of the first `held_len`."""
    whole = payload_bytes(component, component.num_units(num_tokens), component.rows_in_last_unit(num_tokens))
    held = held_len if component.index is IndexKind.PAGE else 0
    return whole - held * component.row_bytes * component.num_layers


class Ledger:
    """components: of what is moved, in the units in which it is. Not safe for use from several threads at once."""

    def __init__(self, components: tuple[StateComponent, ...]) -> None:
        self.components = components
        self._rows = [np.zeros((one.num_layers, 0), dtype=np.int64) for one in components]
        """By component, layer and logical unit: rows with state, 0 for a unit of which nothing is known."""
        self._digests = [np.zeros((one.num_layers, 0, DIGEST_BYTES), dtype=np.uint8) for one in components]

    def record(
        self, component: int, first_unit: int, rows_in_last: int, digests: list[np.ndarray], first_layer: int = 0
    ) -> None:
        """Enters units from `first_unit` on; `digests` holds [units, 16] bytes for each layer from `first_layer` on.
        What was there is replaced."""
        end, layers = first_unit + len(digests[0]), slice(first_layer, first_layer + len(digests))
        self._make_room(component, end)
        self._digests[component][layers, first_unit:end] = digests
        self._rows[component][layers, first_unit:end] = self.components[component].unit_tokens
        self._rows[component][layers, end - 1] = rows_in_last

    def drop(self, component: int, first_unit: int, num_units: int, layers: range) -> None:
        """Forgets what is about to be written again: until that succeeds nothing is known of it."""
        self._rows[component][layers.start : layers.stop, first_unit : first_unit + num_units] = 0

    def receipt(self) -> Receipt:
        parts = zip(self.components, self._rows, self._digests, strict=True)
        return tuple(_receipt(component, rows, digests) for component, rows, digests in parts)

    def _make_room(self, component: int, num_units: int) -> None:
        held = self._rows[component].shape[1]
        if num_units > held:
            rows, digests, room = self._rows[component], self._digests[component], max(num_units, 2 * held)
            self._rows[component] = np.zeros((len(rows), room), rows.dtype)
            self._digests[component] = np.zeros((len(rows), room, DIGEST_BYTES), digests.dtype)
            self._rows[component][:, :held], self._digests[component][:, :held] = rows, digests


def _receipt(component: StateComponent, rows: np.ndarray, digests: np.ndarray) -> ComponentReceipt:
    num_bytes = int(rows.sum()) * component.row_bytes
    digest = xxhash.xxh3_128_hexdigest(digests[rows > 0].tobytes())
    return ComponentReceipt(component.name, num_bytes, digest, component.unit_tokens)
