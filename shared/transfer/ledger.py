"""What of a ticket was moved: digests and rows of each logical unit, and the receipt made of them.

Sender and receiver each keep one; equal ledgers give equal receipts however the units were cut into transfers.
"""

import numpy as np
import xxhash

from shared.state.components import StateComponent
from shared.transfer.link import ComponentReceipt, Receipt
from shared.transfer.pool import DIGEST_BYTES


def payload_bytes(component: StateComponent, num_units: int, rows_in_last: int) -> int:
    """Bytes of the rows with state in `num_units` units, all layers."""
    rows = max(0, num_units - 1) * component.unit_tokens + (rows_in_last if num_units else 0)
    return rows * component.row_bytes * component.num_layers


class Ledger:
    """Not safe for use from several threads at once."""

    def __init__(self, components: tuple[StateComponent, ...]) -> None:
        self._components = components
        self._rows = [np.zeros(0, dtype=np.int64) for _ in components]
        """By component and logical unit: rows with state, 0 for a unit of which nothing is known."""
        self._digests = [np.zeros((0, one.num_layers, DIGEST_BYTES), dtype=np.uint8) for one in components]

    def record(self, component: int, first_unit: int, rows_in_last: int, digests: list[np.ndarray]) -> None:
        """Enters units from `first_unit` on; `digests` holds [units, 16] bytes for each layer. A unit that was there is
        replaced."""
        end = first_unit + len(digests[0])
        self._make_room(component, end)
        self._digests[component][first_unit:end] = np.stack(digests, axis=1)
        self._rows[component][first_unit:end] = self._components[component].unit_tokens
        self._rows[component][end - 1] = rows_in_last

    def drop(self, component: int, first_unit: int, num_units: int) -> None:
        """Forgets units that are about to be written again: until that succeeds nothing is known of them."""
        self._rows[component][first_unit : first_unit + num_units] = 0

    def receipt(self) -> Receipt:
        parts = zip(self._components, self._rows, self._digests, strict=True)
        return tuple(_receipt(component, rows, digests) for component, rows, digests in parts)

    def _make_room(self, component: int, num_units: int) -> None:
        held = len(self._rows[component])
        if num_units > held:
            rows, digests, room = self._rows[component], self._digests[component], max(num_units, 2 * held)
            self._rows[component] = np.zeros(room, rows.dtype)
            self._digests[component] = np.zeros((room, *digests.shape[1:]), digests.dtype)
            self._rows[component][:held], self._digests[component][:held] = rows, digests


def _receipt(component: StateComponent, rows: np.ndarray, digests: np.ndarray) -> ComponentReceipt:
    num_bytes = int(rows.sum()) * component.row_bytes * component.num_layers
    digest = xxhash.xxh3_128_hexdigest(digests[rows > 0].transpose(1, 0, 2).tobytes())
    return ComponentReceipt(component.name, num_bytes, digest)
