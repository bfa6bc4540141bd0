"""Messages about another generation of a ticket: well formed, on the right subject, and void."""

import random

from shared.bus.base import Message
from shared.protocol import subjects
from shared.protocol.messages import (
    Cancel,
    Commit,
    Destination,
    Fail,
    FirstToken,
    Replay,
    Reserve,
    SamplingSpec,
    TokenEntry,
    Tokens,
)
from shared.protocol.reports import Geometry, LinkAddress
from shared.protocol.wire import WireModel, encode
from shared.transfer.link import TicketKey


def forge(rng: random.Random, role: str, peer: str, key: TicketKey) -> Message:
    """One such message to `peer`, where `key` is alive."""
    generation = key.generation - 1 if key.generation > 1 and rng.random() < 0.5 else key.generation + 1
    verb, message = rng.choice(_FORGERIES[role])(rng, TicketKey(key.room, generation))
    return Message(subjects.subject(role, peer, verb), encode(message))


def _cancel(rng: random.Random, key: TicketKey) -> tuple[str, WireModel]:
    return subjects.CANCEL, Cancel(room=key.room, generation=key.generation, reason="cancelled")


def _fail(rng: random.Random, key: TicketKey) -> tuple[str, WireModel]:
    return subjects.FAIL, Fail(
        room=key.room, generation=key.generation, sender="nobody", code="peer_lost", message="an old story"
    )


def _commit(rng: random.Random, key: TicketKey) -> tuple[str, WireModel]:
    first = (FirstToken(choice=0, token=rng.randrange(200)),)
    return subjects.COMMIT, Commit(
        room=key.room, generation=key.generation, prefill="nobody", prompt_len=1, first=first, components=()
    )


def _replay(rng: random.Random, key: TicketKey) -> tuple[str, WireModel]:
    return subjects.REPLAY, Replay(room=key.room, generation=key.generation, wanted=((0, 0),))


def _reserve(rng: random.Random, key: TicketKey) -> tuple[str, WireModel]:
    return subjects.RESERVE, Reserve(
        room=key.room,
        generation=key.generation,
        request_id="req-old",
        gateway="nobody",
        prefill=None,
        identity="another",
        prompt=(1, 2, 3),
        sampling=SamplingSpec(),
        remaining_s=5.0,
    )


def _destination(rng: random.Random, key: TicketKey) -> tuple[str, WireModel]:
    return subjects.DESTINATION, Destination(
        room=key.room,
        generation=key.generation,
        decode="nobody",
        identity="another",
        geometry=Geometry(page_tokens=1, components=(), unit_bytes=()),
        link=LinkAddress(boot_id="nobody", host="", port=0, socket="", backends=()),
        secret=b"x" * 32,
    )


def _tokens(rng: random.Random, key: TicketKey) -> tuple[str, WireModel]:
    tokens = tuple(rng.randrange(200) for _ in range(4))
    entry = TokenEntry(room=key.room, generation=key.generation, choice=0, index=rng.randrange(3), tokens=tokens)
    return subjects.TOKENS, Tokens(sender="nobody", entries=(entry,))


_FORGERIES = {
    "gateway": (_fail, _tokens, _tokens),
    "prefill": (_cancel, _fail, _destination),
    "decode": (_cancel, _fail, _commit, _replay, _reserve),
}
