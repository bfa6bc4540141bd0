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
        self._units: list[dict[int, tuple[int, bytes]]] = [{} for _ in components]

    def record(self, component: int, first_unit: int, rows_in_last: int, digests: list[list[bytes]]) -> None:
        """Enters units from `first_unit` on; `digests` holds one list a layer, with one digest a unit. A unit that was
        there is replaced."""
        rows = self._components[component].unit_tokens
        num_units = len(digests[0])
        for k in range(num_units):
            entry = b"".join(layer[k] for layer in digests)
            self._units[component][first_unit + k] = (rows_in_last if k == num_units - 1 else rows, entry)

    def drop(self, component: int, first_unit: int, num_units: int) -> None:
        """Forgets units that are about to be written again: until that succeeds nothing is known of them."""
        for unit in range(first_unit, first_unit + num_units):
            self._units[component].pop(unit, None)

    def receipt(self) -> Receipt:
        return tuple(
            self._component(component, units) for component, units in zip(self._components, self._units, strict=True)
        )

    def _component(self, component: StateComponent, units: dict[int, tuple[int, bytes]]) -> ComponentReceipt:
        entries = [units[unit] for unit in sorted(units)]
        num_bytes = sum(rows for rows, _ in entries) * component.row_bytes * component.num_layers
        shape = (len(entries), component.num_layers, DIGEST_BYTES)
        by_unit = np.frombuffer(b"".join(entry for _, entry in entries), dtype=np.uint8).reshape(shape)
        digest = xxhash.xxh3_128_hexdigest(by_unit.transpose(1, 0, 2).tobytes())
        return ComponentReceipt(component.name, num_bytes, digest)
