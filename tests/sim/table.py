"""Which faults there are, in which states of a request they can strike, and how often each pair was hit."""

from collections import Counter
from collections.abc import Iterable

from shared.machines import decode, prefill, request

STATES: tuple[tuple[str, str], ...] = tuple(
    (role, state.value)
    for role, machine in (("gateway", request), ("prefill", prefill), ("decode", decode))
    for state in list(next(iter(machine.TERMINAL)).__class__)
    if state not in machine.TERMINAL
)
MESSAGES = ("drop", "duplicate", "delay", "reorder", "stale")
TRANSFERS = ("slow", "lost", "error", "corrupt")
ROLES = ("gateway", "prefill", "decode")
SIDECARS = ("sidecar prefill", "sidecar decode")
PARTITIONS = ("part gateway-prefill", "part gateway-decode", "part prefill-decode")
ISOLATED = tuple(f"isolate {role}" for role in ROLES)
CUT = tuple(f"cut {role}" for role in ROLES)
CRASHES = tuple(f"crash {role}" for role in ROLES)
STRIKES = (*SIDECARS, *PARTITIONS, *ISOLATED, *CUT, "hub outage", *CRASHES, "leave")
FAULTS = (*MESSAGES, *TRANSFERS, *STRIKES, "deadline")

STRUCK_AT_ONCE = (*PARTITIONS, *ISOLATED, *CUT, "hub outage", *CRASHES, "leave")

_SENDS_NOTHING = "bytes travel only while prefill is computing"
_ENDS_AT_ONCE = "only a slow copier is still at it when its ticket has ended"
_NO_WORKERS_YET = "the request has no workers yet"
_NOTHING_SAID_YET = "nothing has been said about the request yet"
_OVER = "the ticket has ended: its deadline means nothing any more"
_ONE_TURN = "entered and left in one call: nothing can come in between"


def impossible(fault: str, role: str, state: str) -> str | None:
    """Why this fault cannot strike a request in this state; None where it can."""
    if state == "committed" and fault not in STRUCK_AT_ONCE:
        return _ONE_TURN
    if fault == "slow" and state in ("releasing", "quarantined"):
        return None
    if fault in TRANSFERS and state in ("releasing", "quarantined"):
        return _ENDS_AT_ONCE
    if fault in TRANSFERS and role == "prefill" and state != "computing":
        return _SENDS_NOTHING
    if fault in TRANSFERS and state in ("started", "preempted", "routing"):
        return _SENDS_NOTHING
    if state == "routing" and fault in ("drop", "duplicate", "delay", "reorder"):
        return _NOTHING_SAID_YET
    roles_struck = {word for word in fault.replace("-", " ").split() if word in ROLES}
    if state == "routing" and roles_struck and "gateway" not in roles_struck:
        return _NO_WORKERS_YET
    if fault == "deadline" and state in ("releasing", "quarantined"):
        return _OVER
    return None


PAIRS = tuple(
    (fault, (role, state)) for fault in FAULTS for role, state in STATES if impossible(fault, role, state) is None
)
TRIGGERED = tuple((fault, where) for fault, where in PAIRS if fault in STRIKES)
"""Those that are aimed; the others strike by chance."""


def missing(hits: Counter[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Pairs that could have been hit and were not."""
    return [(fault, role, state) for fault, (role, state) in PAIRS if not hits[fault, role, state]]


def render(hits: Counter[tuple[str, str, str]]) -> Iterable[str]:
    """The table as lines of text. G, P and D are the roles; a number in brackets says why a pair cannot be."""
    heads = [f"{role[0].upper()}:{state[:5]}" for role, state in STATES]
    yield f"{'hits':22}" + "".join(f"{head:>8}" for head in heads)
    reasons: dict[str, int] = {}
    for fault in FAULTS:
        cells = []
        for role, state in STATES:
            reason = impossible(fault, role, state)
            mark = "" if reason is None else f"({reasons.setdefault(reason, len(reasons) + 1)})"
            cells.append(f"{mark or hits[fault, role, state]:>8}")
        yield f"{fault:22}" + "".join(cells)
    for reason, number in reasons.items():
        yield f"  ({number}) {reason}"
