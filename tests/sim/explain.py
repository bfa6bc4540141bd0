"""Which errors a client may get from which faults. An error that no fault explains is a bug, however typed; and so is
one that another attempt could have spared the client."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from services.gateway.flow_settings import GatewayFlowSettings
from shared.runtime.errors import BatonError, CapacityError
from tests.sim.plan import Visit
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
_LIMITS = GatewayFlowSettings()
_TICK_S = 0.01


def check_error(visit: Visit, error: BatonError, struck: Counter[str], timings: Mapping[str, Any]) -> str | None:
    """None where the error may be; else why not. timings: what the request's own say of its attempts."""
    if error.code == "deadline_exceeded" and visit.is_hurried:
        return None
    if not visit.can_fit and error.code in ("invalid_request", "pool_exhausted"):
        return None
    causes = _EXPLAINED_BY.get(error.code)
    if causes is None:
        return f"{error.code} must not reach a client"
    if not any(struck[fault] for fault in causes):
        return f"nothing that happened explains it (only {sorted(f for f, n in struck.items() if n)})"
    return _could_go_on(visit, error, timings)


def _could_go_on(visit: Visit, error: BatonError, timings: Mapping[str, Any]) -> str | None:
    """What is lost is taken up by other workers until the limits are reached, and who has tokens is never sent away for
    want of room: its workers would have to be gone for longer than any request here may take."""
    if not error.retryable:
        return None
    has_tokens = timings["first_token_s"] is not None
    if isinstance(error, CapacityError):
        return "it has tokens, and so waits for room" if has_tokens else None
    recoveries = timings["recovery"]
    if not has_tokens:
        in_a_row = timings["attempts"]
    else:
        resumed = [number for number, one in enumerate(recoveries, 1) if one["resumed_s"] is not None]
        in_a_row = 1 + len(recoveries) - max(resumed, default=0)
    is_late = timings["total_s"] > visit.timeout_s - _TICK_S
    if not is_late and in_a_row < _LIMITS.max_attempts and len(recoveries) < _LIMITS.max_recoveries:
        return f"it gave up after {in_a_row} failures in a row and {len(recoveries)} recoveries"
    return None
