"""How preparing a model tells what it is doing; a launcher draws a bar from it."""

from typing import Protocol


class OnProgress(Protocol):
    def __call__(self, stage: str, done: int, total: int) -> None:
        """stage: `fetch`, `wait`, `digest`, `weights` or `text`; done of total in units of the stage's own."""


def silent(stage: str, done: int, total: int) -> None:
    """Tells nobody."""
