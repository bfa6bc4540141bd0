"""`python -m benchmarks.neighbour GIB_PER_S`: a process that copies memory at an even rate until its standard input
ends, and then says how many GiB a second it was. Nothing of Baton is in it."""

import select
import sys
import time

import numpy as np

_MIB, _GIB = 1 << 20, 1 << 30
_BUFFER, _PIECE = 256 * _MIB, 4 * _MIB


def main() -> None:
    rate = float(sys.argv[1]) * _GIB
    source, target = (np.full(_BUFFER, value, dtype=np.uint8) for value in (1, 2))
    print("ready", flush=True)
    began, moved = time.perf_counter(), 0
    while not select.select([sys.stdin], [], [], max(0.0, began + moved / rate - time.perf_counter()))[0]:
        at = moved % _BUFFER
        np.copyto(target[at : at + _PIECE], source[at : at + _PIECE])
        moved += _PIECE
    print(moved / _GIB / (time.perf_counter() - began), flush=True)


if __name__ == "__main__":
    main()
