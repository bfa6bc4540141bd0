"""Rows to send: like a model's, or as nasty as bits can be."""

import numpy as np

from shared.state.components import IndexKind, StateComponent

LAYERS, HEADS, WIDTH, PAGE = 6, 2, 32, 16
FLOATS = ("float32", "float16")


def kv(dtype: str) -> StateComponent:
    width = WIDTH + 4 if dtype == "uint8" else WIDTH
    return StateComponent("kv", IndexKind.PAGE, PAGE, (2, HEADS), (width,), dtype, tuple(range(LAYERS)), 0)


SLOTS = StateComponent("memory", IndexKind.REQUEST, 1, (), (5,), "float32", (0, 3))
RING = StateComponent("window", IndexKind.RING, 8, (), (4,), "int64", (1,))


def shape_of(component: StateComponent, units: int, rows: int) -> tuple[int, ...]:
    return component.num_layers, units, int(np.prod(component.outer)), rows, int(np.prod(component.inner))


def like_a_model(component: StateComponent, units: int = 3, rows: int = PAGE, seed: int = 1) -> np.ndarray:
    """Each channel with a mean and a spread of its own, as keys have."""
    random = np.random.default_rng(seed)
    shape = shape_of(component, units, rows)
    layers, _, segments, _, width = shape
    means = random.normal(0, 2, size=(layers, 1, segments, 1, width))
    spreads = np.exp(random.normal(-1, 1, size=(layers, 1, segments, 1, width)))
    values = means + spreads * random.normal(size=shape)
    return values.astype(component.dtype) if component.dtype in FLOATS else any_bits(component, units, rows, seed)


def any_bits(component: StateComponent, units: int = 3, rows: int = PAGE, seed: int = 2) -> np.ndarray:
    """NaN of all kinds, infinities, numbers below the smallest normal one, both zeros."""
    random = np.random.default_rng(seed)
    shape = shape_of(component, units, rows)
    dtype = np.dtype(component.dtype)
    return np.frombuffer(random.bytes(int(np.prod(shape)) * dtype.itemsize), dtype=dtype).reshape(shape).copy()


def scattered(values: np.ndarray) -> np.ndarray:
    """The same rows as they lie in a pool: some of its units and rows, with others between them."""
    layers, units, segments, rows, width = values.shape
    pool = np.zeros((layers, 2 * units, segments, rows + 3, width), dtype=values.dtype)
    view = pool[:, ::2, :, :rows]
    view[...] = values
    return view
