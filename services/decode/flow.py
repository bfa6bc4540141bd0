"""A request's way through D, from the granted reservation to free pages: one coroutine a ticket, in protocol order.

The desk (`desk.py`) has already taken the pages and said yes to the gateway; messages that arrive for the ticket become
events of its machine there, or complete what this coroutine waits for.
"""

import asyncio
from dataclasses import dataclass

from services.decode.history import stored_history
from services.decode.loading import load_stored
from services.decode.loop import TokenOutbox
from services.decode.ticket import DecodeTicket
from shared.bus.ask import ask
from shared.engine.api import Engine, TokenOut
from shared.machines import decode as machine
from shared.machines.stepping import FINISHED, Cause, Quiesced, TellGateway
from shared.protocol import subjects
from shared.protocol.messages import Commit, CommitReply, CommitStatus, Destination, DestinationReply, DestinationStatus
from shared.runtime.deps import Deps
from shared.runtime.errors import (
    BatonError,
    Corrupt,
    PeerLost,
    PrefixGone,
    ProtocolError,
    TransferTimeout,
    UnknownRoom,
    error_from_code,
)
from shared.runtime.scope import until
from shared.transfer.formats.agree import accepted
from shared.transfer.formats.catalog import lossiest
from shared.transfer.ledger import state_bytes
from shared.transfer.link import Link, Receipt
from shared.worker.checkpoint import Checkpoint
from shared.worker.loading import Loaded
from shared.worker.notices import tell_failure
from shared.worker.stores import Stores


@dataclass(frozen=True, slots=True)
class DecodeFlowSettings:
    """probe_s: how long D waits in silence before it asks P whether the ticket still lives there.
    unknown_asks: how often P may say that it has not heard of the ticket. landing_s: how long bytes may be behind the
    record. tell_s: how long a peer is told of a failure."""

    probe_s: float = 1.0
    unknown_asks: int = 8
    landing_s: float = 5.0
    tell_s: float = 5.0


@dataclass(frozen=True, slots=True)
class DecodeFlow:
    """What the coroutine works with."""

    deps: Deps
    engine: Engine
    link: Link
    outbox: TokenOutbox
    stores: Stores | None = None
    settings: DecodeFlowSettings = DecodeFlowSettings()


async def serve_ticket(d: DecodeFlow, ticket: DecodeTicket) -> None:
    """Runs a granted ticket to its end. Returns when its pages are free."""
    ticket.held = d.engine.held(ticket.key)
    try:
        with ticket.scope:
            ticket.scope.check()
            async with until(ticket.deadline, "the request"):
                if ticket.order.prefill is None:
                    loaded = Loaded(ticket.held.num_tokens, ticket.held.lossiest)
                    if ticket.order.load:
                        loaded = await load_stored(d.deps, d.link, d.stores, ticket)
                        ticket.scope.check()
                    _start_local(d, ticket, loaded)
                else:
                    async with stored_history(d.deps, d.link, d.stores, ticket):
                        units = d.engine.unit_tables(ticket.key)
                        formats, given = accepted(ticket.order.kv_precision), ticket.given.num_tokens
                        await d.link.open(ticket.key, ticket.secret, units, ticket.first_bytes, given, formats)
                        await _publish_destination(d, ticket)
                        record = await _await_record(d, ticket)
                        _check_record(ticket, record)
                        if not _ended_at_first(ticket, record):
                            _check_complete(d, ticket, record, await _await_bytes(d, ticket, record))
                    await d.link.fence(ticket.key)  # from here on only the engine writes these pages
                    _take_over(d, ticket, record)
                ticket.scope.check()
                await ticket.all_done.wait()
        ticket.end(FINISHED)
    except BatonError as error:
        ticket.end(error.code, error.message, by=error.by or "decode")
    except Exception as error:
        ticket.end("internal_error", type(error).__name__, by="decode")
        raise
    finally:
        await _release(d, ticket)


def perform(d: DecodeFlow, ticket: DecodeTicket, effect: object) -> None:
    """Carries out one effect of the ticket's machine."""
    match effect:
        case machine.StartGroup():
            d.engine.start_prefilled(ticket.key, ticket.first_tokens(), _came_by(ticket))
            ticket.apply(machine.Started(ticket.key.generation))
        case machine.AckCommit():
            if not ticket.commit_answer.done():
                ticket.commit_answer.set_result(CommitReply(status=CommitStatus.COMMITTED))
        case machine.Quarantine():
            ticket.scope.end()
        case machine.TellPrefill(cause=cause):
            assert ticket.order.prefill is not None
            _tell(d, ticket, "prefill", ticket.order.prefill, cause)
        case TellGateway(cause=cause):
            _tell(d, ticket, "gateway", ticket.order.gateway, cause)


async def _publish_destination(d: DecodeFlow, ticket: DecodeTicket) -> None:
    """Tells P where the state goes, until P says that it has heard it. NATS does not order two publishers, so P may be
    asked before the gateway's own message has reached it: *unknown* is asked again for a while."""
    assert ticket.order.prefill is not None
    for turn in range(d.settings.unknown_asks):
        await d.deps.clock.sleep(0.05 * turn)
        reply = await _send_destination(d, ticket, ticket.order.prefill)
        if reply.status is DestinationStatus.ACCEPTED:
            return
        if reply.status is not DestinationStatus.UNKNOWN:
            raise _refusal(reply)
    raise UnknownRoom("the prefill worker never heard of this ticket")


async def _send_destination(d: DecodeFlow, ticket: DecodeTicket, prefill: str) -> DestinationReply:
    destination = Destination(
        room=ticket.key.room,
        generation=ticket.key.generation,
        decode=d.deps.peer,
        identity=d.engine.identity,
        geometry=d.engine.geometry,
        link=d.link.address,
        secret=ticket.secret,
        held_len=ticket.given.num_tokens,
    )
    where = subjects.subject("prefill", prefill, subjects.DESTINATION)
    try:
        return await ask(d.deps.bus, d.deps.clock, where, destination, DestinationReply, deadline=ticket.deadline)
    except PeerLost as error:
        error.by = "prefill"
        raise


async def _await_record(d: DecodeFlow, ticket: DecodeTicket) -> Commit:
    """Waits for P's commit record. In silence it asks P (by repeating the destination) rather than guess."""
    assert ticket.order.prefill is not None
    while True:
        await asyncio.wait({ticket.record}, timeout=d.settings.probe_s)
        if ticket.record.done():
            return ticket.record.result()
        reply = await _send_destination(d, ticket, ticket.order.prefill)
        if reply.status is not DestinationStatus.ACCEPTED and not ticket.record.done():
            raise _refusal(reply)


def _check_record(ticket: DecodeTicket, record: Commit) -> None:
    """Raises ProtocolError unless it speaks of this prompt (and what a single choice has had since), has token 0 of
    each choice, and names no wire format that was not asked for."""
    if record.prompt_len != ticket.state_len:
        raise ProtocolError(f"the record speaks of {record.prompt_len} tokens, and {ticket.state_len} are handed over")
    if [first.choice for first in record.first] != list(range(len(ticket.choices))):
        raise ProtocolError(f"the record has not one token for each of {len(ticket.choices)} choices, in order")
    formats = {record.wire_format, *(one.wire_format for one in record.on_wire)}
    if unasked := formats - set(accepted(ticket.order.kv_precision)):
        raise ProtocolError(f"the state came as {min(unasked)}; asked for was {ticket.order.kv_precision}")


def _check_complete(d: DecodeFlow, ticket: DecodeTicket, record: Commit, landed: Receipt) -> None:
    """Raises Corrupt where P has not sent every row of every layer that we lack: our own counts agree with its. What we
    hold is sent again where it shares a unit of P's with what we lack."""
    sent, held_len = [(c.name, c.num_bytes) for c in landed], ticket.given.num_tokens
    needed = [
        (c.name, state_bytes(c, record.prompt_len, held_len - held_len % theirs.unit_tokens))
        for c, theirs in zip(d.engine.layout.components, landed, strict=True)
    ]
    if sent != needed:
        raise Corrupt(f"the prompt's state is {needed}, and {sent} was sent")


async def _await_bytes(d: DecodeFlow, ticket: DecodeTicket, record: Commit) -> Receipt:
    """What has landed, once it is what the record says by our own sidecar's counts and digests; raises Corrupt, naming
    the component."""
    give_up = d.deps.clock.now() + d.settings.landing_s
    while True:
        landed = await d.link.received(ticket.key)
        if [(c.name, c.num_bytes) for c in landed] == [(c.name, c.num_bytes) for c in record.components]:
            break
        if d.deps.clock.now() >= give_up:
            raise TransferTimeout(f"landed {[(c.name, c.num_bytes) for c in landed]}, sent {record.components}")
        await d.deps.clock.sleep(0.005)
    for ours, theirs in zip(landed, record.components, strict=True):
        if ours.digest != theirs.digest:
            raise Corrupt(f"component {ours.name!r}: the bytes that arrived are not the bytes that were sent")
    return landed


def _take_over(d: DecodeFlow, ticket: DecodeTicket, record: Commit) -> None:
    """Commits (this starts the group and answers P) and passes token 0 on, whether or not P's own message got there. A
    choice that had one already keeps it; its entry, empty yet, says that D has taken over."""
    now = d.deps.clock.now()
    ticket.timings = ticket.timings.model_copy(
        update={
            "queue_s": record.timings.queue_s,
            "prefill_s": record.timings.prefill_s,
            "transfer_s": record.timings.transfer_s,
            "moved_s": record.timings.moved_s,
            "commit_s": 0.0 if ticket.filling_at is None else now - ticket.filling_at,
            "bytes": tuple((c.name, c.num_bytes) for c in record.components),
            "wire_format": record.wire_format,
            "wire_bytes": tuple((one.name, one.num_bytes) for one in record.on_wire),
            "backend": record.timings.backend,
            "backend_asked": record.timings.backend_asked,
            "held_tokens": ticket.held.num_tokens,
            "cached_tokens": record.timings.cached_tokens,
        }
    )
    _begin_checkpoint(d, ticket, _came_by(ticket))
    for first in record.first:  # the log takes what comes next, and that is token 0 only where there was none before
        ticket.log(TokenOut(ticket.key, first.choice, 0, first.token, first.logprob, first.finish))
    if ticket.all_done.is_set():  # the handoff tokens ended it: nothing to start, P may let go
        ticket.commit_answer.set_result(CommitReply(status=CommitStatus.COMMITTED))
    else:
        ticket.apply(machine.CommitMatched(ticket.key.generation))
        if ticket.checkpoint is not None:
            ticket.checkpoint.reach(ticket.stored_len)
    d.outbox.send_from(ticket, index=0)


def _start_local(d: DecodeFlow, ticket: DecodeTicket, loaded: Loaded) -> None:
    """D computes what is not there. PrefixGone where that is more than was meant."""
    if ticket.held.num_tokens < ticket.order.held_least:
        raise PrefixGone(f"{ticket.held.num_tokens} positions of {ticket.order.held_least} are here")
    told = {"held_tokens": ticket.held.num_tokens, "cached_tokens": loaded.num_tokens}
    ticket.timings = ticket.timings.model_copy(update=told)
    ticket.apply(machine.StartedLocally(ticket.key.generation))
    _begin_checkpoint(d, ticket, loaded.lossiest)
    d.engine.start_local(ticket.key, loaded.num_tokens, loaded.lossiest)


def _came_by(ticket: DecodeTicket) -> str:
    """The lossiest of the formats in which P has sent anything, and of what was there without it."""
    record = ticket.record.result()
    sent = (one.wire_format for one in record.on_wire if one.num_bytes)
    return lossiest((record.wire_format, ticket.given.lossiest, *sent))


def _begin_checkpoint(d: DecodeFlow, ticket: DecodeTicket, came_by: str) -> None:
    """From now on the ticket's blocks go into the stores: of a single choice all, of several what they have in common.
    came_by: the lossiest format of its state."""
    if d.stores is None:
        return
    order, past = ticket.order, ticket.past
    known = order.prompt + past.outputs[0] if len(past.outputs) == 1 else order.prompt
    lineage, tenant = d.stores.lineage(order.salt, came_by), order.salt.partition("/")[0]
    tell = lambda position: d.outbox.send_stored(ticket, position)  # noqa: E731
    ticket.checkpoint = Checkpoint(d.deps, d.stores, ticket.key, lineage, known, tenant, tell)


def _refusal(reply: DestinationReply) -> BatonError:
    """P's own end, whatever its reason: it need not be told."""
    error = error_from_code(reply.code or "dead_room", reply.message or "the prefill worker has ended this ticket")
    error.by = "prefill"
    return error


def _ended_at_first(ticket: DecodeTicket, record: Commit) -> bool:
    """The handoff tokens end it: there is no state to wait for. Where a choice goes on P has sent all of it."""
    return not any(ticket.past.outputs) and all(first.finish is not None for first in record.first)


async def _release(d: DecodeFlow, ticket: DecodeTicket) -> None:
    """Quarantine: first no writer may be left, then no step; only then are the pages free."""
    ticket.end("peer_lost", "the decode worker is shutting down", by="decode")  # nothing new where the end is known
    if ticket.order.prefill is not None or ticket.order.load:
        await d.link.fence(ticket.key)  # if this fails there is no proof, and the pages stay held
    for door in ticket.doors:
        await d.link.fence(door)
    await d.engine.retire(ticket.key)
    if not ticket.commit_answer.done():
        cause = ticket.state.cause or Cause("dead_room")
        status = CommitStatus.FAILED if cause.failed else CommitStatus.DEAD
        ticket.commit_answer.set_result(CommitReply(status=status, code=cause.code, message=cause.message))
    if not ticket.record.done():
        ticket.record.cancel()
    ticket.apply(Quiesced(ticket.key.generation))
    d.deps.changed()


def _tell(d: DecodeFlow, ticket: DecodeTicket, role: str, peer: str, cause: Cause) -> None:
    telling = tell_failure(d.deps, role, peer, ticket.key, cause, d.settings.tell_s)
    d.deps.spawn(telling, f"tell-{role}-{ticket.key.room}")
