"""A request's way through P, from the accepted prompt to free pages: one coroutine a ticket, in protocol order.

The desk (`desk.py`) has already taken the pages and said yes to the gateway; messages that arrive for the ticket become
events of its machine there, or complete what this coroutine waits for.
"""

import asyncio
from contextlib import aclosing

from services.prefill.destination import await_destination, by_decode, was_deaf
from services.prefill.parts import PrefillFlow
from services.prefill.storing import checkpoint_of
from services.prefill.ticket import PrefillTicket
from shared.bus.ask import ask
from shared.engine.api import ChunkDone
from shared.machines import prefill as machine
from shared.machines.stepping import Cause, Quiesced, TellGateway
from shared.protocol import subjects
from shared.protocol.messages import (
    Commit,
    CommitReply,
    CommitStatus,
    Destination,
    FirstToken,
    Prefill,
    PrefillTimings,
    TicketTimings,
    TokenEntry,
    Tokens,
    Verdict,
)
from shared.runtime.errors import (
    BatonError,
    DeadlineExceeded,
    EngineError,
    PeerLost,
    ProtocolError,
)
from shared.runtime.overlap import choose_cut
from shared.runtime.scope import until
from shared.transfer.classes import Standing, TrafficClass
from shared.transfer.formats.agree import ran
from shared.transfer.link import OwnSidecarLost, digests_of
from shared.worker.notices import tell_failure


async def serve_ticket(p: PrefillFlow, ticket: PrefillTicket) -> None:
    """Runs an accepted prompt to its end. Returns when its pages are free."""
    try:
        with ticket.scope:
            ticket.scope.check()
            async with until(ticket.deadline, "the prompt"):
                if p.settings.optimistic_attempts and not ticket.destination.done():  # by default no prefill is wasted
                    ticket.apply(machine.BegunAhead(ticket.key.generation))
                    p.engine.compute_ahead(ticket.key, p.settings.optimistic_attempts)
                destination = await await_destination(p, ticket)
                asked_at = p.deps.clock.now()
                cached_len = await _bring_back(p, ticket)
                wire_format = p.wire.choose(ticket.order, destination.link, cached_len, destination.held_len)
                first, computed_at = await _compute_and_send(p, ticket, destination, wire_format, cached_len)
                begun_at = p.engine.begun_at(ticket.key) or asked_at
                if begun_at >= asked_at:  # else it was computed ahead, who knows how fast
                    p.wire.computed(len(ticket.order.prompt) - cached_len, computed_at - begun_at)
                begun_at = max(asked_at, begun_at)
                timings = PrefillTimings(
                    queue_s=begun_at - ticket.granted_at,
                    prefill_s=computed_at - begun_at,
                    transfer_s=p.deps.clock.now() - computed_at,
                    moved_s=ticket.moving.total_s,
                    backend=p.link.actual_backend(ticket.key),
                    backend_asked=p.link.address.asked,
                    cached_tokens=cached_len,
                )
                p.observe(timings)
                record = await _commit_record(p, ticket, first, timings)
                ticket.apply(machine.AllSent(ticket.key.generation))
                await _repeat_commit(p, ticket, record)
                ticket.apply(machine.CommitAnswered(ticket.key.generation))
    except BatonError as error:
        ticket.end(error.code, error.message, by=error.by or "prefill")
    except Exception as error:
        ticket.end("internal_error", type(error).__name__, by="prefill")
        raise
    finally:
        await _release(p, ticket)


def perform(p: PrefillFlow, ticket: PrefillTicket, effect: object) -> None:
    """Carries out one effect of the ticket's machine. Computing and committing are the coroutine's own next lines."""
    match effect:
        case machine.Unpin():
            ticket.scope.end()
        case machine.TellDecode(cause=cause):
            _tell(p, ticket, "decode", ticket.order.decode, cause)
        case TellGateway(cause=cause):
            _tell(p, ticket, "gateway", ticket.order.gateway, cause)


async def _bring_back(p: PrefillFlow, ticket: PrefillTicket) -> int:
    """So many leading positions need not be computed: P's pages have them, or the stores bring them."""
    held = p.engine.held(ticket.key)
    if p.loading is None or p.settings.optimistic_attempts:  # what is computed ahead may have no pages now
        return held.num_tokens
    cached_len = await p.loading.load(ticket, held)
    ticket.scope.check()
    return cached_len


async def _compute_and_send(
    p: PrefillFlow, ticket: PrefillTicket, destination: Destination, wire_format: str, cached_len: int
) -> tuple[tuple[FirstToken, ...], float]:
    """Prefills in chunks; the pages of a chunk, or of some of its layers, travel while the engine goes on computing and
    the first tokens go to the client. What was computed ahead comes as one chunk. Returns the handoff tokens and when
    they were there. If the first token ends the request, what is not sent yet is not sent."""
    order = ticket.order
    last: tuple[tuple[FirstToken, ...], float] | None = None
    cut = choose_cut(p.settings.overlap, p.settings.layers_per_send, len(order.prompt))
    checkpoint = None if p.stores is None else checkpoint_of(p.deps, p.stores, ticket)
    try:
        computing = p.engine.prefill(ticket.key, cut, destination.held_len, cached_len)
        async with asyncio.TaskGroup() as sends, aclosing(computing) as chunks:
            async for chunk in chunks:
                if checkpoint is not None and not chunk.partial:
                    checkpoint.reach(chunk.end)
                if chunk.last:
                    last = chunk.first, p.deps.clock.now()
                    if not order.resumed:
                        p.deps.spawn(_send_first(p, ticket, chunk, cached_len), f"first-token-{ticket.key.room}")
                if chunk.pieces and not _ends_at_first(order, chunk):
                    sends.create_task(_send(p, ticket, destination, chunk, wire_format))  # the link keeps their order
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    if last is None:
        raise EngineError("the engine ended a prompt without a first token")
    return last


async def _send(
    p: PrefillFlow, ticket: PrefillTicket, destination: Destination, chunk: ChunkDone, wire_format: str
) -> None:
    """Hands the chunk's state over. Where the two sidecars lose each other, nobody can tell which end is cut off."""
    ends = chunk.end == len(ticket.order.prompt)  # also its first layers, sent while the others are computed
    traffic = TrafficClass.LAST if ends else TrafficClass.HANDOFF
    standing = Standing(traffic, ticket.order.priority)
    try:
        with ticket.moving.span(p.deps.clock):
            await p.link.send(ticket.key, destination.secret, destination.link, chunk.pieces, wire_format, standing)
    except PeerLost as error:
        error.by = "prefill" if isinstance(error, OwnSidecarLost) else "link"
        raise


async def _send_first(p: PrefillFlow, ticket: PrefillTicket, chunk: ChunkDone, cached_len: int) -> None:
    """Token 0 of every choice straight to the gateway, until it says that it has it (D passes it on as well); and how
    much needed not be computed, which nobody else says where these tokens end the answer."""
    entries = tuple(
        TokenEntry(
            room=ticket.key.room,
            generation=ticket.key.generation,
            choice=first.choice,
            index=0,
            tokens=(first.token,),
            logprobs=() if first.logprob is None else (first.logprob,),
            finish=first.finish,
        )
        for first in chunk.first
    )
    where = subjects.subject("gateway", ticket.order.gateway, subjects.TOKENS)
    timings = ((ticket.key.room, TicketTimings(cached_tokens=cached_len)),)
    message = Tokens(sender=p.deps.peer, entries=entries, timings=timings)
    try:
        deadline = p.deps.clock.now() + p.settings.tell_s
        await ask(p.deps.bus, p.deps.clock, where, message, Verdict, deadline=deadline)
    except (PeerLost, DeadlineExceeded, ProtocolError):
        p.deps.counters.add("first_tokens_unheard")


async def _commit_record(
    p: PrefillFlow, ticket: PrefillTicket, first: tuple[FirstToken, ...], timings: PrefillTimings
) -> Commit:
    """What D needs to take over: N, token 0 of each choice, and what was sent, by component."""
    receipt, on_wire = await p.link.sent(ticket.key), p.link.on_wire(ticket.key)
    p.wire.ran(on_wire)
    return Commit(
        room=ticket.key.room,
        generation=ticket.key.generation,
        prefill=p.deps.peer,
        prompt_len=len(ticket.order.prompt),
        first=first,
        components=digests_of(receipt),
        wire_format=ran(on_wire),
        on_wire=on_wire,
        timings=timings,
    )


async def _repeat_commit(p: PrefillFlow, ticket: PrefillTicket, record: Commit) -> None:
    """Repeats the record until D has decided. The pages stay pinned until then."""
    where = subjects.subject("decode", ticket.order.decode, subjects.COMMIT)
    deadline = min(ticket.deadline, p.deps.clock.now() + p.settings.commit_s)
    disconnects = p.deps.bus.stats.disconnects
    while True:
        try:
            reply = await ask(p.deps.bus, p.deps.clock, where, record, CommitReply, deadline=deadline)
        except PeerLost as error:
            raise by_decode(error) from None
        except DeadlineExceeded:
            if deadline >= ticket.deadline:
                raise
            if not was_deaf(p, disconnects):
                raise by_decode(PeerLost("decode does not answer the commit")) from None
            deadline = min(ticket.deadline, p.deps.clock.now() + p.settings.commit_s)
            disconnects = p.deps.bus.stats.disconnects
            continue
        match reply.status:
            case CommitStatus.COMMITTED:
                return
            case CommitStatus.DEAD | CommitStatus.FAILED:
                ticket.end(reply.code or "dead_room", reply.message, by="decode")
                ticket.scope.check()
            case CommitStatus.PENDING:
                continue


def _ends_at_first(order: Prefill, chunk: ChunkDone) -> bool:
    """Whether nobody will need the state. A resumed request has had its first tokens: D goes on from others."""
    if order.resumed:
        return False
    return order.sampling.max_tokens == 1 or (chunk.last and all(first.finish is not None for first in chunk.first))


async def _release(p: PrefillFlow, ticket: PrefillTicket) -> None:
    """Quarantine: first no reader may be left, then no step; only then are the pages free."""
    ticket.end("peer_lost", "the prefill worker is shutting down", by="prefill")  # nothing new where the end is known
    await p.link.forget(ticket.key)  # if this fails there is no proof, and the pages stay held
    for door in ticket.doors:
        await p.link.fence(door)
    await p.engine.retire(ticket.key)
    if not ticket.destination.done():
        ticket.destination.cancel()
    ticket.apply(Quiesced(ticket.key.generation))
    p.deps.changed()


def _tell(p: PrefillFlow, ticket: PrefillTicket, role: str, peer: str, cause: Cause) -> None:
    telling = tell_failure(p.deps, role, peer, ticket.key, cause, p.settings.tell_s)
    p.deps.spawn(telling, f"tell-{role}-{ticket.key.room}")
