"""Whatever the bus does to token messages, the letterbox passes each index once and in order."""

import random

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.generation import TokenEvent
from services.gateway.history import History
from services.gateway.inbox import Inbox
from shared.machines.stepping import Cause
from shared.protocol.messages import Fail, FinishReason, RollCall, TokenEntry, TokenLogprob, Tokens
from shared.runtime.clock import LoopClock
from shared.runtime.counters import Counters

ROOM, GENERATION = 5, 2


def entry(
    index: int, tokens: tuple[int, ...], finish: FinishReason | None = None, generation: int = GENERATION
) -> TokenEntry:
    logprobs = tuple(TokenLogprob(logprob=-float(t)) for t in tokens)
    return TokenEntry(
        room=ROOM, generation=generation, choice=0, index=index, tokens=tokens, logprobs=logprobs, finish=finish
    )


@given(st.integers(1, 12), st.integers(0, 2**32), st.booleans())
def test_overlapping_repeated_and_reordered_messages_give_one_stream(length: int, seed: int, lossy: bool) -> None:
    rng = random.Random(seed)
    tokens = tuple(range(100, 100 + length))
    messages = []
    for _ in range(4 * length):
        start = rng.randrange(length)
        end = rng.randrange(start + 1, length + 1)
        messages.append(entry(start, tokens[start:end], FinishReason.LENGTH if end == length else None))
    if not lossy:
        messages.append(entry(0, tokens, FinishReason.LENGTH))
    box = Inbox(Counters()).open(ROOM, GENERATION, History.empty(1))
    for message in messages:
        box.deliver(message)
    passed = [event.token for event in box.events]
    assert passed == list(tokens[: len(passed)])
    assert [event.index for event in box.events] == list(range(len(passed)))
    assert [event.logprob and event.logprob.logprob for event in box.events] == [-float(t) for t in passed]
    assert [event.finish for event in box.events[:-1]] == [None] * max(0, len(passed) - 1)
    assert box.finished[0] is (len(passed) == length)
    if not lossy:
        assert len(passed) == length


def test_a_hole_is_noted_and_nothing_behind_it_passes() -> None:
    box = Inbox(Counters()).open(ROOM, GENERATION, History.empty(1))
    assert box.deliver(entry(0, (1, 2))) == 2
    assert box.deliver(entry(3, (4,))) == 0
    assert box.gap
    assert box.expected == [2]


def test_a_later_attempt_begins_behind_what_the_client_has() -> None:
    """Also where somebody says all of it again; what was accepted and never taken is not part of it."""
    history = History.empty(2)
    first = Inbox(Counters()).open(ROOM, GENERATION, history)
    first.deliver(entry(0, (1, 2, 3)))
    history.add([TokenEvent(0, 0, 1), TokenEvent(0, 1, 2), TokenEvent(1, 0, 9, finish=FinishReason.STOP)])
    box = Inbox(Counters()).open(ROOM, GENERATION, history)
    assert box.deliver(entry(0, (1, 2))) == 0
    assert box.deliver(entry(0, (1, 2, 3, 4), FinishReason.LENGTH)) == 2
    assert [(event.index, event.token) for event in box.events] == [(2, 3), (3, 4)]
    assert box.deliver(entry(1, (7,)).model_copy(update={"choice": 1})) == 0
    assert all(box.finished)


async def test_strangers_are_counted_and_change_nothing() -> None:
    counters = Counters()
    inbox = Inbox(counters)
    box = inbox.open(ROOM, GENERATION, History.empty(1))
    late = entry(0, (9,), generation=GENERATION - 1)
    beyond = entry(0, (9,)).model_copy(update={"choice": 3})
    await inbox.on_tokens(Tokens(sender="d", entries=(late, beyond)))
    assert box.events == []
    assert counters["late_tokens"] == 1
    fail = Fail(room=ROOM, generation=GENERATION - 1, sender="d", code="peer_lost", message="", by="prefill")
    await inbox.on_fail(fail)
    assert box.failure is None
    await inbox.on_fail(fail.model_copy(update={"generation": GENERATION, "message": "first"}))
    await inbox.on_fail(fail.model_copy(update={"generation": GENERATION, "message": "second"}))
    assert box.failure == Cause("peer_lost", "first", by="prefill")
    inbox.close(ROOM)
    await inbox.on_tokens(Tokens(sender="d", entries=(entry(0, (9,)),)))
    assert counters["late_tokens"] == 2
    assert len(inbox) == 0


class SetClock(LoopClock):
    at = 100.0

    def now(self) -> float:
        return self.at


async def test_the_roll_says_what_is_over() -> None:
    """A room that is open is not, nor for a while one that was left for another gateway."""
    clock = SetClock()
    inbox = Inbox(Counters(), clock)
    for room in (1, 2, 3, 4):
        inbox.open(room, GENERATION, History.empty(1))
    inbox.close(2)
    inbox.close(3, keep_s=8.0)
    inbox.close(4, keep_s=30.0)

    async def over() -> tuple[int, ...]:
        return (await inbox.on_roll_call(RollCall(sender="d", rooms=(1, 2, 3, 4, 5)))).gone

    assert await over() == (2, 5)
    clock.at += 7.9
    assert await over() == (2, 5)
    clock.at += 0.2
    assert await over() == (2, 3, 5)
    clock.at += 30.0
    assert await over() == (2, 3, 4, 5)


async def test_rooms_that_were_left_are_bounded_in_number() -> None:
    inbox = Inbox(Counters(), SetClock())
    for room in range(1, 6001):
        inbox.close(room, keep_s=8.0)
    reply = await inbox.on_roll_call(RollCall(sender="d", rooms=(1, 6000)))
    assert reply.gone == (1,)
