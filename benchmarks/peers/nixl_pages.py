"""NIXL with UCX: one write of all pages with a notice, no progress thread (with one it is slower). The environment says
what UCX may use. Descriptors of all pages of both pools are prepared once, as engines do it."""

import base64
import time
from typing import Any

import numpy as np
from lines import serve  # type: ignore[import-not-found]
from pages import Pages, Wire, apart, poll  # type: ignore[import-not-found]

PAGES = Pages.from_arguments()
_LOOKS = 64


def agent(name: str, pool: np.ndarray) -> Any:
    from nixl_cu12._api import nixl_agent, nixl_agent_config  # after the fork: it starts threads

    made = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    made.register_memory([(pool.ctypes.data, len(pool), 0, "")], "DRAM")
    return made


def blocks(pool_at: int) -> np.ndarray:
    rows = np.zeros((PAGES.pool_pages, 3), dtype=np.uint64)
    rows[:, 0] = pool_at + np.arange(PAGES.pool_pages, dtype=np.uint64) * np.uint64(PAGES.page_bytes)
    rows[:, 1] = PAGES.page_bytes
    return rows


def receive(wire: Wire) -> None:
    """Asks for notices all the time, which is what makes its side of UCX move, and passes them on."""
    pool = PAGES.new_pool(2)
    mine = agent("receiver", pool)
    wire.say(metadata=base64.b64encode(mine.get_agent_metadata()).decode(), at=pool.ctypes.data)
    mine.add_remote_agent(base64.b64decode(wire.hear()["metadata"]))
    wire.say(ready=True)
    wire.sock.setblocking(False)
    while True:
        for _ in range(_LOOKS):
            if any(mine.get_new_notifs().values()):
                wire.sock.setblocking(True)
                wire.say(landed=True)
                wire.sock.setblocking(False)
        try:
            word = wire.sock.recv(100)
        except BlockingIOError:
            continue
        if not word:
            return
        wire.sock.setblocking(True)
        wire.say(check=PAGES.check(pool, int(word)))
        wire.sock.setblocking(False)


def start() -> Any:
    wire = apart(receive)
    pool = PAGES.new_pool(1)
    mine = agent("sender", pool)
    theirs = wire.hear()
    wire.say(metadata=base64.b64encode(mine.get_agent_metadata()).decode())
    peer = mine.add_remote_agent(base64.b64decode(theirs["metadata"]))
    peer = peer.decode() if isinstance(peer, bytes) else peer
    wire.hear()
    here = mine.prep_xfer_dlist("NIXL_INIT_AGENT", blocks(pool.ctypes.data), "DRAM")
    there = mine.prep_xfer_dlist(peer, blocks(theirs["at"]), "DRAM")

    def measure(kind: str, seed: int) -> float:
        source, target = (PAGES.chosen(one).astype(np.int32) for one in (seed, seed + 1))
        began = time.perf_counter()
        handle = mine.make_prepped_xfer("WRITE", here, source, there, target, b"landed")
        state = mine.transfer(handle)
        if state == "ERR":
            raise RuntimeError("the transfer failed")
        poll(lambda: mine.check_xfer_state(handle) == "DONE")
        if not wire.hear().get("landed"):
            raise RuntimeError("the receiver is gone")
        took_s = time.perf_counter() - began
        mine.release_xfer_handle(handle)
        if seed == 0:
            wire.sock.sendall(b"1")
            if wire.hear()["check"] != PAGES.check(pool, 0):
                raise RuntimeError("what landed is not what was sent")
        return took_s

    return measure


if __name__ == "__main__":
    serve(start)
