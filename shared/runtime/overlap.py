"""When a prompt's state leaves a prefill worker: while the rest of the prompt is still computed, or at its end."""

from dataclasses import dataclass
from typing import Literal

Overlap = Literal["auto", "chunks", "layers"]

ONE_PIECE_LEN = 64
"""Prompts of so many tokens and less leave in one piece under `auto`: their state is small, and moves in less time than
the messages around further transfers take."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a prompt's state is cut into transfers. by_chunks: what a chunk completes leaves while the next one is
    computed; else all leaves at the end. layers: of a chunk so many layers leave at a time, as soon as they are
    computed; 0: all layers at once."""

    by_chunks: bool = True
    layers: int = 0

    def __post_init__(self) -> None:
        if self.layers and not self.by_chunks:
            raise ValueError("layers leave chunk by chunk")


BY_CHUNKS = Cut()


def choose_cut(overlap: Overlap, layers_per_send: int, prompt_len: int) -> Cut:
    """What the setting means for a prompt. `auto` goes by its length; the others are taken at their word."""
    if overlap == "layers":
        return Cut(layers=layers_per_send)
    return Cut(by_chunks=overlap == "chunks" or prompt_len > ONE_PIECE_LEN)
