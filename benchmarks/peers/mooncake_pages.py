"""Mooncake's Transfer Engine over TCP: writes of all pages, in calls of as many as it takes at once."""

import time
from typing import Any

import numpy as np
from lines import serve  # type: ignore[import-not-found]
from pages import Pages, Wire, apart  # type: ignore[import-not-found]

PAGES = Pages.from_arguments()
_AT_ONCE = 1024
"""It refuses more than about 4,096 a call, and is fastest with fewer."""


def engine(pool: np.ndarray) -> Any:
    from mooncake.engine import TransferEngine  # after the fork: it starts threads

    made = TransferEngine()
    if made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise RuntimeError("the transfer engine does not start")
    if made.register_memory(pool.ctypes.data, len(pool)) != 0:
        raise RuntimeError("the transfer engine does not take the pool")
    return made


def receive(wire: Wire) -> None:
    pool = PAGES.new_pool(2)
    mine = engine(pool)
    wire.say(name=f"127.0.0.1:{mine.get_rpc_port()}", at=pool.ctypes.data)
    while "seed" in (message := wire.hear()):
        wire.say(check=PAGES.check(pool, message["seed"]))


def start() -> Any:
    wire = apart(receive)
    pool = PAGES.new_pool(1)
    mine, theirs = engine(pool), wire.hear()
    size = PAGES.page_bytes

    def measure(kind: str, seed: int) -> float:
        source, target = (PAGES.chosen(one) for one in (seed, seed + 1))
        began = time.perf_counter()
        for at in range(0, len(source), _AT_ONCE):
            here = (pool.ctypes.data + source[at : at + _AT_ONCE] * size).tolist()
            there = (theirs["at"] + target[at : at + _AT_ONCE] * size).tolist()
            if mine.batch_transfer_sync_write(theirs["name"], here, there, [size] * len(here)) != 0:
                raise RuntimeError("the transfer failed")
        took_s = time.perf_counter() - began
        if seed == 0:
            wire.say(seed=1)
            if wire.hear()["check"] != PAGES.check(pool, 0):
                raise RuntimeError("what landed is not what was sent")
        return took_s

    return measure


if __name__ == "__main__":
    serve(start)
