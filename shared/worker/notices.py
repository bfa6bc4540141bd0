"""Telling another process that a ticket ended, and why."""

from shared.bus.ask import ask
from shared.machines.stepping import Cause
from shared.protocol import subjects
from shared.protocol.messages import Fail, Verdict
from shared.runtime.deps import Deps
from shared.runtime.errors import DeadlineExceeded, PeerLost, ProtocolError
from shared.transfer.link import TicketKey


async def tell_failure(deps: Deps, role: str, peer: str, key: TicketKey, cause: Cause, within_s: float) -> None:
    """Repeats the notice until it is heard or `within_s` is over; what nobody hears is counted."""
    notice = Fail(
        room=key.room,
        generation=key.generation,
        sender=deps.peer,
        code=cause.code,
        message=cause.message,
        by=cause.by,
    )
    where = subjects.subject(role, peer, subjects.FAIL)
    try:
        await ask(deps.bus, deps.clock, where, notice, Verdict, deadline=deps.clock.now() + within_s)
    except (PeerLost, DeadlineExceeded, ProtocolError):
        deps.counters.add("fail_notices_unheard")
