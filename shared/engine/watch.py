"""What the loop and the compute thread say to each other while a step is computed: which layers are done, and that
nobody wants the step any more."""

from collections.abc import Callable

LayerDone = Callable[[int], None]
"""Called by a model in the compute thread when the state of a layer is written, in the order of the layers."""


class StepUnwanted(Exception):
    """Every group of the step has ended; it stops between two layers."""


class StepWatch:
    """One step's. The loop sets `unwanted`; the compute thread reads it, and through `tell` says how many layers, from
    the first one on, have their state where links find it."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self._tell = tell
        self.unwanted = False
        self.layers_done = 0

    def are_done(self, num_layers: int) -> None:
        self.layers_done = num_layers
        self._tell(num_layers)

    def check(self) -> None:
        """Raises StepUnwanted."""
        if self.unwanted:
            raise StepUnwanted
