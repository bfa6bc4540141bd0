"""Random walks: what the network and the processes may do to one ticket, in any order, and what must hold then."""

from hypothesis import given
from hypothesis import strategies as st

from shared.machines import decode, prefill, request
from shared.machines.stepping import Cause, Event, IllegalTransition, Outcome

GENERATION = 5
generations = st.sampled_from([GENERATION, GENERATION, GENERATION, 4, 6])
causes = st.sampled_from(
    [
        Cause("finished"),
        Cause("cancelled", by="gateway"),
        Cause("peer_lost", by="prefill"),
        Cause("engine_error", by="decode"),
    ]
)


def events(machine: object, plain: list[type[Event]]) -> st.SearchStrategy[Event]:
    made = st.builds(lambda kind, g: kind(g), st.sampled_from(plain), generations)
    ended = st.builds(lambda g, cause: machine.Ended(g, cause), generations, causes)  # type: ignore[attr-defined]
    return st.one_of(made, made, made, ended)


DECODE_EVENTS = events(
    decode,
    [
        decode.FirstBytes,
        decode.CommitMatched,
        decode.StartedLocally,
        decode.Started,
        decode.Preempted,
        decode.Resumed,
        decode.Quiesced,
    ],
)


@given(st.lists(DECODE_EVENTS, max_size=30))
def test_decode_commits_once_quarantines_once_and_frees_after_proof(walk: list[Event]) -> None:
    ticket = decode.DecodeTicket(1, GENERATION, remote=True)
    effects: list[object] = []
    for event in walk:
        try:
            step = decode.step(ticket, event)
        except IllegalTransition:
            continue
        if event.generation != GENERATION:
            assert step.outcome is Outcome.STALE
            assert step.ticket == ticket
        effects += step.effects
        if step.ticket.state is decode.DecodeState.FREE and ticket.state is not decode.DecodeState.FREE:
            assert ticket.state is decode.DecodeState.QUARANTINED
            assert isinstance(event, decode.Quiesced)
        ticket = step.ticket
    assert sum(isinstance(e, decode.StartGroup) for e in effects) <= 1
    assert sum(isinstance(e, decode.AckCommit) for e in effects) == sum(
        isinstance(e, decode.StartGroup) for e in effects
    )
    quarantines = sum(isinstance(e, decode.Quarantine) for e in effects)
    assert quarantines == int(ticket.state in (decode.DecodeState.QUARANTINED, decode.DecodeState.FREE))
    told = [e.cause for e in effects if isinstance(e, decode.TellPrefill)]
    assert all(cause.by != "prefill" for cause in told)


PREFILL_EVENTS = events(
    prefill,
    [
        prefill.DestinationArrived,
        prefill.BegunAhead,
        prefill.ComputedAhead,
        prefill.Yielded,
        prefill.Returned,
        prefill.AllSent,
        prefill.CommitAnswered,
        prefill.Quiesced,
    ],
)
SENDING = (prefill.PrefillState.COMPUTING, prefill.PrefillState.COMMITTING)


@given(st.lists(PREFILL_EVENTS, max_size=30))
def test_prefill_sends_only_after_the_destination_and_unpins_once(walk: list[Event]) -> None:
    ticket = prefill.PrefillTicket(1, GENERATION)
    effects: list[object] = []
    arrived = False
    for event in walk:
        try:
            step = prefill.step(ticket, event)
        except IllegalTransition:
            continue
        arrived |= step.outcome is Outcome.APPLIED and isinstance(event, prefill.DestinationArrived)
        assert arrived or step.ticket.state not in SENDING
        effects += step.effects
        ticket = step.ticket
    kinds = [type(e) for e in effects]
    assert kinds.count(prefill.Unpin) == int(
        ticket.state in (prefill.PrefillState.RELEASING, prefill.PrefillState.RELEASED)
    )
    told = [e.cause for e in effects if isinstance(e, prefill.TellDecode)]
    assert all(cause.by != "decode" for cause in told)


REQUEST_EVENTS = events(request, [request.WorkersChosen, request.Granted, request.TokensArrived, request.AllDone])


@given(st.lists(REQUEST_EVENTS, max_size=30))
def test_an_attempt_knows_whether_it_has_emitted_and_tells_its_legs_once(walk: list[Event]) -> None:
    attempt = request.Attempt(1, GENERATION)
    told = 0
    asked = False
    emitted = False
    for event in walk:
        try:
            step = request.step(attempt, event)
        except IllegalTransition:
            continue
        asked |= step.ticket.state is request.RequestState.GRANTING
        told += request.CancelLegs() in step.effects
        emitted |= step.outcome is Outcome.APPLIED and isinstance(event, request.TokensArrived)
        attempt = step.ticket
        assert attempt.emitted is emitted
    assert told == int(asked and attempt.state is request.RequestState.ENDED)
