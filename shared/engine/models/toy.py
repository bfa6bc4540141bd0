"""A model without meaning that has every kind of state there is. Tests and the simulation run on it.

Whole numbers modulo a prime, so results are exact for any chunking and any batch. Every logit depends on every row of
every component and on the token's position: losing, misplacing or leaking any of it changes the tokens. Rows that were
never written are read as they lie, so a slot that was not cleared shows up too.
"""

import hashlib

import numpy as np
import torch

from shared.engine.models.base import Batch
from shared.engine.watch import LayerDone
from shared.state.components import IndexKind, StateComponent

VOCAB_SIZE = 256
EOS_TOKEN = 255
_PRIME = 8191
_LAYERS = 2
_CHANNELS = 4
_RING = 8

_CHANNEL_WEIGHTS = np.arange(3, 3 + 2 * _CHANNELS, 2, dtype=np.int64)
_RING_WEIGHTS = np.arange(11, 11 + 7 * _RING, 7, dtype=np.int64)
_VOCAB = np.arange(1, VOCAB_SIZE + 1, dtype=np.int64)

Array = np.ndarray


class Toy:
    """`salt` makes another model of it, with its own identity; so does `by_position`: it keeps all of its state by
    position, as models without windows and recurrent state do."""

    vocab_size = VOCAB_SIZE
    eos_token_ids = frozenset({EOS_TOKEN})

    def __init__(self, max_model_len: int = 4096, salt: int = 0, *, by_position: bool = False) -> None:
        self.max_model_len = max_model_len
        self.identity = hashlib.sha256(f"toy-1-{salt}{'-by-position' * by_position}".encode()).hexdigest()
        self._salt = salt
        self._by_position = by_position

    def components(self, page_tokens: int) -> tuple[StateComponent, ...]:
        layers = tuple(range(_LAYERS))
        history = StateComponent(
            "history", IndexKind.PAGE, page_tokens, (2,), (_CHANNELS,), "float32", layers, shard_axis=0
        )
        if self._by_position:
            return (history,)
        return (
            history,
            StateComponent("memory", IndexKind.REQUEST, 1, (), (_CHANNELS,), "int32", layers),
            StateComponent("window", IndexKind.RING, _RING, (), (_CHANNELS,), "float32", layers),
        )

    def forward(
        self, batch: Batch, state: tuple[torch.Tensor, ...], layer_done: LayerDone | None = None
    ) -> torch.Tensor:
        history, *others = (tensor.numpy() for tensor in state)
        tokens, positions = batch.tokens.numpy(), batch.positions.numpy()
        tables, slots = batch.block_tables.numpy(), batch.slots.numpy()
        hidden = (tokens * 7 + positions * 13 + 29 + self._salt) % _PRIME
        groups = _equal_lengths(batch.query_start.numpy())
        # Rows beyond a sequence's end are read along with the rest of their page; whatever they hold is not used.
        with np.errstate(invalid="ignore"):
            for layer in range(_LAYERS):
                for rows, where in groups:
                    x, at, slot = hidden[where], positions[where], slots[rows]
                    seen = _history(x, at, history[layer], tables[rows])
                    if others:
                        memory, window = others
                        seen += 5 * _memory(x, at, memory[layer], slot)
                        seen += 17 * _window(x, at, window[layer], slot)
                    hidden[where] = (seen + x * (layer + 2)) % _PRIME
                if layer_done is not None:
                    layer_done(layer)
        wanted = hidden[batch.logit_rows.numpy()] % (_PRIME - 1) + 1
        scores = (wanted[:, None] * _VOCAB[None, :]) % _PRIME  # [R, vocab], no two equal in a row
        return torch.from_numpy(scores.astype(np.float32) * np.float32(8 / _PRIME))


def _equal_lengths(starts: Array) -> list[tuple[Array, Array]]:
    """Sequences with equally many new tokens are computed together: (their rows [S], their tokens' indices [S, T])."""
    lengths = starts[1:] - starts[:-1]
    groups = []
    for length in sorted(set(lengths.tolist())):
        rows = np.flatnonzero(lengths == length)
        groups.append((rows, starts[rows][:, None] + np.arange(length)))
    return groups


def _channels(x: Array, offset: int) -> Array:
    """[S, T] -> [S, T, channels], each 1..250: never 0, which is what lost state looks like."""
    return 1 + (x[..., None] * _CHANNEL_WEIGHTS + offset) % 250


def _weigh(positions: Array) -> Array:
    """A weight for each position, never 0 modulo the prime for positions below it."""
    return 1 + (positions * 37 + 5) % (_PRIME - 1)


def _history(x: Array, where: Array, pages: Array, tables: Array) -> Array:
    """Writes the rows of `where` [S, T], then sums for each of them all rows up to it. pages: [P, 2, B, channels]."""
    page_tokens = pages.shape[2]
    rows = _channels(x, 3)
    each = np.arange(len(x))[:, None]
    page, row = tables[each, where // page_tokens], where % page_tokens
    pages[page, 0, row] = rows
    pages[page, 1, row] = rows + 1
    longest = int(where[:, -1].max()) + 1
    both = pages[tables[:, : -(-longest // page_tokens)]].astype(np.int64)  # [S, M, 2, B, channels]
    flat = (both[:, :, 0] + 3 * both[:, :, 1]) @ _CHANNEL_WEIGHTS
    flat = flat.reshape(len(x), -1)[:, :longest]
    sums = np.cumsum(flat % _PRIME * _weigh(np.arange(longest)) % _PRIME, axis=1)
    return np.asarray(sums[each, where] % _PRIME)


def _memory(x: Array, where: Array, memory: Array, slots: Array) -> Array:
    """A running sum over all positions, kept in one row a slot. memory: [slots, 1, channels]."""
    steps = _channels(x, 7) * _weigh(where * 3 + 1)[..., None]
    sums = (memory[slots].astype(np.int64) + np.cumsum(steps, axis=1)) % _PRIME  # [S, T, channels]
    memory[slots, 0] = sums[:, -1]
    return np.asarray(sums @ _CHANNEL_WEIGHTS % _PRIME)


def _window(x: Array, where: Array, window: Array, slots: Array) -> Array:
    """A weighted sum over the last positions, by how long ago they were. window: [slots, ring, channels]."""
    count, slots = x.shape[1], slots[:, None]
    before = window[slots, (where[:, :1] + np.arange(1 - _RING, 0)) % _RING].astype(np.int64)
    rows = np.concatenate([before, _channels(x, 11)], axis=1)  # [S, ring - 1 + T, channels]
    sums = rows @ _CHANNEL_WEIGHTS
    result = sum(sums[:, _RING - 1 - ago : _RING - 1 - ago + count] * _RING_WEIGHTS[ago] for ago in range(_RING))
    kept = min(count, _RING)
    window[slots, where[:, -kept:] % _RING] = rows[:, -kept:]
    return np.asarray(result % _PRIME)
