"""Messages that nobody should send on the bus, and what must be counted for each: for fuzz tests and floods.

Noise is never forged: it does not speak for a live ticket under its right generation. Whoever may publish on the bus
could; the bus's login is the fence for that.
"""

import json
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shared.protocol import subjects
from shared.protocol.messages import (
    Cancel,
    Commit,
    Destination,
    Fail,
    FirstToken,
    Prefill,
    Replay,
    Reserve,
    SamplingSpec,
    TokenEntry,
    Tokens,
)
from shared.protocol.reports import Geometry, LinkAddress, WorkerReport
from shared.protocol.wire import MalformedMessage, WireModel, decode, encode

LISTENERS: dict[str, dict[str, type[WireModel]]] = {
    "decode": {"reserve": Reserve, "commit": Commit, "replay": Replay, "cancel": Cancel, "fail": Fail},
    "prefill": {"prefill": Prefill, "destination": Destination, "cancel": Cancel, "fail": Fail},
    "gateway": {"tokens": Tokens, "fail": Fail},
}
_LATE = {"commit", "replay", "cancel", "fail"}
"""Verbs of which a message for a ticket that does not live counts as late, once."""
_CAPTURED = 400
_NEWEST = 4
_OVERSIZED = 0.0005

Sent = tuple[str, bytes, str]
"""subject, data, reply"""


@dataclass
class Target:
    """One process of each role, and what its peers know of it. peers: role -> name and boot id."""

    peers: dict[str, str]
    identity: str
    geometry: Geometry


class Noise:
    """Made by a seed. expected: (role, counter) -> what must be counted at least ("*": by all roles together). rooms:
    live ones. captured: what the target itself has said."""

    def __init__(self, target: Target, seed: int) -> None:
        self.rng = random.Random(seed)
        self.target = target
        self.expected: Counter[tuple[str, str]] = Counter()
        self.sorts: Counter[str] = Counter()
        self.rooms: deque[int] = deque(maxlen=64)
        self.captured: deque[Sent] = deque(maxlen=_CAPTURED)

    def everything(self) -> Iterator[Sent]:
        """For ever: a random message of a random sort."""
        weights: list[tuple[int, Callable[[], Sent]]] = [
            (20, self._garbage),
            (15, self._wrong_kind),
            (30, self._unknown_ticket),
            (10, self._wrong_generation),
            (5, self._heartbeat),
            (10, self._nowhere),
            (8, self._replayed),
            (1, self._unasked_answer),
        ]
        makers = [maker for weight, maker in weights for _ in range(weight)]
        while True:
            maker = self.rng.choice(makers) if self.rng.random() > _OVERSIZED else self._oversized
            self.sorts[maker.__name__.removeprefix("_")] += 1
            yield maker()

    def orphan_destinations(self) -> Iterator[Sent]:
        """Destinations for rooms that nobody has heard of."""
        while True:
            yield self._addressed("prefill", "destination", encode(self.make("destination", self.new_room(), 1)))

    def duplicate_rooms(self, room: int) -> Iterator[Sent]:
        """Orders for one room, to D and to P, under its own generation 1 and under ever new ones."""
        generation = 1
        while True:
            generation += 1
            for role, verb in (("decode", "reserve"), ("prefill", "prefill")):
                for each in (1, generation):
                    data = encode(self.make(verb, room, each, self.target.identity))
                    yield self._addressed(role, verb, data)
                self.expected[role, "orders_repeated"] += 1
                self.expected[role, "rooms_reused"] += 1

    def questions(self) -> list[Sent]:
        """One for each process, which answers it."""
        asked: dict[str, WireModel] = {
            "replay": Replay(room=self.new_room(), generation=1, wanted=()),
            "cancel": Cancel(room=self.new_room(), generation=1, reason="noise"),
            "fail": Fail(room=self.new_room(), generation=1, sender="nobody", code="peer_lost", message=""),
        }
        roles = ("decode", "prefill", "gateway")
        return [self._addressed(role, verb, encode(asked[verb])) for role, verb in zip(roles, asked, strict=True)]

    def overhear(self, subject: str, data: bytes, reply: str) -> None:
        """Takes in what goes over the bus: a real order names a live room, the rest can be said again."""
        if subject == self.to("decode", "reserve"):
            try:
                order = decode(Reserve, data)
            except MalformedMessage:
                return
            if order.request_id != "noise" and order.generation == 1:
                self.rooms.append(order.room)
        if not self.sorts and len(self.captured) < _CAPTURED and subject.count(".") == 4:
            self.captured.append((subject, data, reply))

    # Sorts of noise

    def _garbage(self) -> Sent:
        role, verb = self._somewhere()
        good = encode(self.make(verb, self.new_room(), 1))
        place = self.rng.randrange(len(good))
        data = self.rng.choice(
            [
                self.rng.randbytes(self.rng.randrange(200)),
                b"",
                good[:place],
                good[:place] + self.rng.randbytes(1) + good[place + 1 :],
                good + good,
                b"[" * self.rng.randrange(1, 3000),
                json.dumps({"kind": verb, "room": self.rng.choice([0, -1, 1 << 63, 1.5, "1", None])}).encode(),
                json.dumps(json.loads(good) | {"surprise": 1}).encode(),
                json.dumps(json.loads(good) | {"v": 2}).encode(),
            ]
        )
        return self._addressed(role, verb, data)

    def _wrong_kind(self) -> Sent:
        role, verb = self._somewhere()
        other = self.rng.choice([v for verbs in LISTENERS.values() for v in verbs if v != verb])
        return self._addressed(role, verb, encode(self.make(other, self.new_room(), 1)))

    def _unknown_ticket(self) -> Sent:
        role, verb = self._somewhere()
        return self._addressed(role, verb, encode(self.make(verb, self.new_room(), self.rng.randrange(1, 9))))

    def _wrong_generation(self) -> Sent:
        known = list(self.rooms)[:-_NEWEST]  # by now all who should have heard of them
        if not known:
            return self._unknown_ticket()
        role, verb = self._somewhere()
        message = self.make(verb, self.rng.choice(known), self.rng.randrange(100, 1000), self.target.identity)
        return self._addressed(role, verb, encode(message))

    def _heartbeat(self) -> Sent:
        """From processes that do not exist; never one that claims to be ready, for that would be forged."""
        name, boot_id = f"ghost-{self.rng.randrange(200)}", self.rng.randbytes(3).hex()
        subject = subjects.subject("decode", f"{name}-{boot_id}", subjects.HEARTBEAT)
        report = WorkerReport(role="decode", id=name, boot_id=boot_id, pid=1, host="nowhere", state="starting")
        sort = self.rng.randrange(3)
        if sort == 0:
            return subject, encode(report), ""
        self.expected["gateway", "malformed_heartbeat"] += 1
        if sort == 1:
            return subject.replace("decode", "prefill", 1), encode(report), ""  # another's subject
        for role in ("decode", "prefill"):
            self.expected[role, "malformed_heartbeat"] += 1
        return subject, self.rng.randbytes(30), ""

    def _nowhere(self) -> Sent:
        role, verb = self._somewhere()
        name = self.target.peers[role].rpartition("-")[0]
        old = f"baton.v1.{role}.{name}"
        wrong = [f"{old}-0badb007.{verb}", f"{old}.{verb}", f"baton.v2.{role}.{name}-1.{verb}", f"{old}-1.destroy"]
        subject = self.rng.choice([*wrong, "some.thing.else", f"baton.v1.sidecar.{name}-1.{verb}"])
        return subject, encode(self.make(verb, self.new_room(), 1)), self._reply()

    def _replayed(self) -> Sent:
        """What the target itself has said, once more."""
        if not self.captured:
            return self._nowhere()
        subject, data, reply = self.rng.choice(self.captured)
        _, _, role, _, verb = subject.split(".")
        if subject == self.to(role, verb):
            self._note(role, verb, data)
        return subject, data, reply

    def _unasked_answer(self) -> Sent:
        replies = [reply for _, _, reply in self.captured if reply.count(".") == 2]
        if not replies:
            return self._nowhere()
        self.expected["*", "bus_late_answers"] += 1
        prefix = self.rng.choice(replies).rpartition(".")[0]
        return f"{prefix}.9{self.rng.randrange(10**9):09d}", b'{"kind":"verdict","ok":true}', ""

    def _oversized(self) -> Sent:
        """As much as a message can hold, and valid where it may be so long."""
        role, verb = self._somewhere()
        data = json.loads(encode(self.make(verb, self.new_room(), 1)))
        long = next((name for name in ("reason", "message", "request_id", "identity") if name in data), "surprise")
        data[long] = "x" * self.rng.randrange(200_000, 900_000)
        return self._addressed(role, verb, json.dumps(data).encode())

    # Parts

    def to(self, role: str, verb: str) -> str:
        return f"{subjects.PREFIX}.{role}.{self.target.peers.get(role, '')}.{verb}"

    def new_room(self) -> int:
        return self.rng.randrange(1, 1 << 63)

    def make(self, verb: str, room: int, generation: int, identity: str = "another") -> WireModel:
        """A valid message. Orders name another model unless told otherwise, so that none of them can be granted."""
        rng, ticket = self.rng, {"room": room, "generation": generation}
        gateway, decoder, prefiller = (self.target.peers[role] for role in ("gateway", "decode", "prefill"))
        order = {"request_id": "noise", "gateway": gateway, "identity": identity, "remaining_s": rng.uniform(0, 9)}
        order |= {"prompt": tuple(rng.randrange(200) for _ in range(rng.randrange(9))), "sampling": SamplingSpec()}
        link = LinkAddress(boot_id="x", host="127.0.0.1", port=1, socket="", backends=("tcp",))
        place = {"identity": self.target.identity, "geometry": self.target.geometry, "link": link, "secret": b"s" * 32}
        first = (FirstToken(choice=0, token=rng.randrange(1 << 20)),)
        entry = TokenEntry(**ticket, choice=rng.randrange(3), index=rng.randrange(9), tokens=(1, 2, 3))
        made: dict[str, Callable[[], WireModel]] = {
            "reserve": lambda: Reserve(**ticket, **order, prefill=prefiller),
            "prefill": lambda: Prefill(**ticket, **order, decode=decoder),
            "destination": lambda: Destination(**ticket, **place, decode=decoder),
            "commit": lambda: Commit(**ticket, prefill=prefiller, prompt_len=3, first=first, components=()),
            "replay": lambda: Replay(**ticket, wanted=((0, rng.randrange(1 << 40)),)),
            "cancel": lambda: Cancel(**ticket, reason="noise", choice=rng.choice([None, 0, 1 << 40])),
            "fail": lambda: Fail(**ticket, sender="nobody", code="corrupt_state", message="noise"),
            "tokens": lambda: Tokens(sender="nobody", entries=(entry,) * rng.randrange(4)),
        }
        return made[verb]()

    def _addressed(self, role: str, verb: str, data: bytes) -> Sent:
        self._note(role, verb, data)
        return self.to(role, verb), data, self._reply()

    def _note(self, role: str, verb: str, data: bytes) -> None:
        if verb not in LISTENERS.get(role, {}):
            return
        self.expected[role, f"received_{verb}"] += 1
        try:
            message = decode(LISTENERS[role][verb], data)
        except MalformedMessage:
            self.expected[role, f"malformed_{verb}"] += 1
            return
        if isinstance(message, Tokens):
            self.expected[role, "late_tokens"] += len(message.entries)
        elif verb in _LATE:
            self.expected[role, f"late_{verb}"] += 1

    def _somewhere(self) -> tuple[str, str]:
        role = self.rng.choice(sorted(LISTENERS))
        return role, self.rng.choice(sorted(LISTENERS[role]))

    def _reply(self) -> str:
        """Where nobody waits; and often no answer is asked for."""
        return f"_INBOX.noise.{self.rng.randrange(1000)}" if self.rng.random() < 0.5 else ""
