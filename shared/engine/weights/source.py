"""What a model family needs of a file that holds tensors, whatever its format."""

from collections.abc import Set
from typing import Protocol

import numpy as np


class TensorSource(Protocol):
    """Named tensors that are read one at a time, always widened to float32."""

    def __str__(self) -> str:
        """The file or directory, as error messages name it."""

    @property
    def names(self) -> Set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises InvalidModel where the tensor is missing."""

    def read(self, name: str) -> np.ndarray:
        """float32 of `shape(name)`, row-major. Raises InvalidModel where it is missing or of an unknown format."""
