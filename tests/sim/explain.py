"""Which errors a client may get from which faults. An error that no fault explains is a bug, however typed."""

from collections import Counter

from shared.runtime.errors import BatonError
from tests.sim.plan import Plan, Visit
from tests.sim.table import CRASHES, CUT, ISOLATED, PARTITIONS, SIDECARS

_DOWN = frozenset((*CRASHES, *CUT, *ISOLATED, *PARTITIONS, *SIDECARS, "hub outage", "lost", "slow"))
_WIRE = frozenset(("error", "lost", "slow"))
_EXPLAINED_BY: dict[str, frozenset[str]] = {
    "peer_lost": _DOWN | _WIRE,
    "transfer_failed": _DOWN | _WIRE,
    "transfer_timeout": _DOWN | _WIRE,
    "transfer_refused": _DOWN | _WIRE,
    "dead_room": _DOWN | _WIRE,
    "unknown_room": _DOWN,
    "no_worker": _DOWN,
    "overloaded": _DOWN | _WIRE,
    "ticket_denied": _DOWN | _WIRE,
    "pool_exhausted": _DOWN | _WIRE,
    "deadline_exceeded": _DOWN | _WIRE,
    "corrupt_state": frozenset(("corrupt",)),
}


def check_error(visit: Visit, error: BatonError, struck: Counter[str], plan: Plan) -> str | None:
    """None where the error may be; else why not."""
    if error.code == "deadline_exceeded" and visit.is_hurried:
        return None
    if not visit.can_fit and error.code in ("invalid_request", "pool_exhausted"):
        return None
    causes = _EXPLAINED_BY.get(error.code)
    if causes is None:
        return f"{error.code} must not reach a client"
    if not any(struck[fault] for fault in causes):
        return f"nothing that happened explains it (only {sorted(f for f, n in struck.items() if n)})"
    return None
