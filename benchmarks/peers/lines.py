"""How an engine under measurement talks to the benchmark: JSON lines on its standard streams. Imports nothing but the
standard library, since each engine has a Python environment of its own."""

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def serve(start: Callable[[], Callable[..., Any]]) -> None:
    """Says {"ready": true} once `start` has returned, then answers each line {"kind": …, …} with {"value": …}. What
    libraries print goes to standard error."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        measure = start()
        _say(out, {"ready": True})
        for line in sys.stdin:
            _say(out, {"value": measure(**json.loads(line))})


def prompt(length: int, seed: int) -> list[int]:
    """Token ids that no two seeds share a beginning of."""
    return [1000 + (seed * 7919 + k * 31) % 40000 for k in range(length)]


def _say(out: Any, message: dict[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()
