"""Every NATS subject Baton uses: `baton.v1.<role>.<peer>.<verb>`, built here and nowhere else.

<peer> is a process's name and boot id, so a message for an earlier incarnation reaches nobody (and the bus says so at
once), never its successor. In the order of a request's life:

    gateway  -> decode   reserve       pages for the prompt and the first steps, or no
    gateway  -> prefill  prefill       the prompt
    decode   -> prefill  destination   where the pages go; repeated until answered
    prefill  -> gateway  tokens        token 0, repeated until answered
    prefill  -> decode   commit        token 0, counts and digests; repeated until answered
    decode   -> gateway  tokens        one message a step and gateway
    gateway  -> decode   replay        tokens from k, after a gap or silence; P asks too, whether the ticket lives
    any      -> any      cancel, fail  the end, both ways
    gateway  -> worker   ping          are you there?
    worker   -> gateway  roll_call     which of these tickets have you ended?
    worker   -> kvstore  offer         blocks of a chain: which do you want, and where to?
    worker   -> kvstore  stored        the wanted ones were sent: counts and digests; repeated until decided
    any      -> kvstore  lookup        how many of these blocks are there? They are leased
    worker   -> kvstore  load          send leased blocks into my ticket; repeated until done
    any      -> kvstore  lease         keep a lease for longer, or let it go
    gateway  -> gateway  hand_over     let go of this stream: its client is with me now
    any      -> all      heartbeat     what a process is and has
"""

import re

PREFIX = "baton.v1"

RESERVE = "reserve"
PREFILL = "prefill"
DESTINATION = "destination"
COMMIT = "commit"
TOKENS = "tokens"
REPLAY = "replay"
CANCEL = "cancel"
FAIL = "fail"
HEARTBEAT = "heartbeat"
PING = "ping"
ROLL_CALL = "roll_call"
HAND_OVER = "hand_over"
OFFER = "offer"
STORED = "stored"
LOOKUP = "lookup"
LOAD = "load"
LEASE = "lease"

_TICKET_VERBS = (RESERVE, PREFILL, DESTINATION, COMMIT, TOKENS, REPLAY, CANCEL, FAIL, HEARTBEAT, PING, ROLL_CALL)
VERBS = (*_TICKET_VERBS, HAND_OVER, OFFER, STORED, LOOKUP, LOAD, LEASE)
ROLES = ("gateway", "prefill", "decode", "sidecar", "kvstore")
_PEER = re.compile(r"[a-z0-9_-]{1,64}")


def subject(role: str, peer: str, verb: str) -> str:
    """The subject on which `peer` listens for `verb`."""
    if role not in ROLES or verb not in VERBS:
        raise ValueError(f"no such subject: {role}.{verb}")
    if not _PEER.fullmatch(peer):
        raise ValueError(f"not the name of a peer: {peer!r}")
    return f"{PREFIX}.{role}.{peer}.{verb}"


def all_heartbeats() -> str:
    return f"{PREFIX}.*.*.{HEARTBEAT}"


def heartbeats_of(role: str) -> str:
    return subject(role, "any", HEARTBEAT).replace(".any.", ".*.")


def hello() -> str:
    """Whoever hears this sends its heartbeat at once; a gateway asks at its start."""
    return f"{PREFIX}.all.hello"
