"""What goes to and from kvstores as files; as in `test_golden.py`.

After an intended change: BATON_UPDATE_GOLDEN=1 python -m pytest tests/unit/protocol/test_golden_store.py
"""

import json
import os
import secrets
from pathlib import Path

import pytest

from shared.bus.base import MAX_PAYLOAD_BYTES
from shared.protocol import store_messages
from shared.protocol.messages import CommitStatus, ComponentDigest, OnWire
from shared.protocol.reports import LinkAddress
from shared.protocol.store_messages import (
    MAX_KEYS,
    ComponentSpec,
    Lease,
    Load,
    LoadReply,
    LoadStatus,
    Lookup,
    LookupReply,
    NamespaceSpec,
    Offer,
    OfferReply,
    OfferStatus,
    Stored,
    StoredReply,
)
from shared.protocol.wire import MalformedMessage, WireModel, decode, encode

GOLDEN = Path(__file__).parent / "golden_store"
UPDATE = "BATON_UPDATE_GOLDEN"
ROOM = (1 << 63) - 1
KEYS = (bytes(range(16)), bytes(range(16, 32)))
LINK = LinkAddress(boot_id="eeee0001", host="10.0.0.9", port=7400, socket="s-eeee0001.sock", backends=("shm", "tcp"))
KV = ComponentSpec(
    name="kv", index="page", unit_tokens=64, outer=(2, 3), inner=(64,), dtype="float32", layers=(0, 1), shard_axis=1
)
WINDOW = ComponentSpec(
    name="window", index="ring", unit_tokens=128, outer=(2,), inner=(8,), dtype="float16", layers=(1,)
)
NAMESPACE = NamespaceSpec(identity="sha256:1234", block_tokens=64, components=(KV, WINDOW))
DIGESTS = (
    ComponentDigest(name="kv", num_bytes=196608, digest="00ff"),
    ComponentDigest(name="window", num_bytes=0, digest="99aa"),
)
OFFER = Offer(
    room=ROOM,
    generation=1,
    worker="p0-bbbb0001",
    tenant="acme",
    namespace=NAMESPACE,
    parent=bytes(16),
    first_block=3,
    keys=KEYS,
    pin_s=5.0,
    remaining_s=29.5,
)
LOOKUP = Lookup(lease=ROOM, namespace=NAMESPACE, first_block=3, keys=KEYS, remaining_s=30.0)

SAMPLES: dict[str, WireModel] = {
    "offer": OFFER,
    "offer_reply": OfferReply(
        status=OfferStatus.GRANTED, wanted=(1,), held=1, link=LINK, secret=bytes(range(32)), remaining_s=29.4
    ),
    "offer_reply_refused": OfferReply(status=OfferStatus.REFUSED, code="store_full", message="no room"),
    "stored": Stored(room=ROOM, generation=1, components=DIGESTS),
    "stored_reply": StoredReply(status=CommitStatus.COMMITTED),
    "lookup": LOOKUP,
    "lookup_reply": LookupReply(num_blocks=2, num_bytes=393216, beneath=(1,)),
    "load": Load(
        room=ROOM,
        generation=2,
        lease=7,
        num_blocks=2,
        first_token=192,
        link=LINK,
        secret=bytes(range(16)),
        wire_format="lossless",
        priority=-1,
        remaining_s=9.5,
    ),
    "load_reply": LoadReply(
        status=LoadStatus.DONE,
        num_blocks=2,
        components=DIGESTS,
        on_wire=(OnWire(name="kv", wire_format="raw", num_bytes=393216),),
        backend="shm",
    ),
    "load_reply_failed": LoadReply(status=LoadStatus.FAILED, code="unknown_room", message="there is no such lease"),
    "lease": Lease(lease=ROOM, remaining_s=0.0),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_the_wire_has_not_changed(name: str) -> None:
    path = GOLDEN / f"{name}.json"
    text = json.dumps(json.loads(encode(SAMPLES[name])), indent=2, ensure_ascii=False) + "\n"
    if os.environ.get(UPDATE) == "1":
        path.write_text(text)
    assert path.exists(), f"no golden file for {name}; make it with {UPDATE}=1"
    assert text == path.read_text(), f"the wire changed; if that is meant, run this file with {UPDATE}=1"


@pytest.mark.parametrize("name", SAMPLES)
def test_golden_files_are_read_as_what_was_written(name: str) -> None:
    assert decode(type(SAMPLES[name]), (GOLDEN / f"{name}.json").read_bytes()) == SAMPLES[name]


def test_every_message_has_a_golden_file_and_every_file_a_message() -> None:
    found = [one for one in vars(store_messages).values() if isinstance(one, type) and issubclass(one, WireModel)]
    kinds = {one for one in found if one.__module__ == store_messages.__name__ and "kind" in one.model_fields}
    assert {type(sample) for sample in SAMPLES.values()} == kinds
    assert {path.stem for path in GOLDEN.glob("*")} == set(SAMPLES)
    assert len({kind.model_fields["kind"].default for kind in kinds}) == len(kinds)


def test_the_longest_messages_fit() -> None:
    keys = tuple(secrets.token_bytes(16) for _ in range(MAX_KEYS))
    layers = tuple(range(1024))
    spec = NAMESPACE.model_copy(update={"components": (KV.model_copy(update={"layers": layers}),) * 32})
    for message in (OFFER, LOOKUP):
        longest = message.model_copy(update={"keys": keys, "namespace": spec})
        assert len(encode(longest)) < MAX_PAYLOAD_BYTES // 2
        assert decode(type(longest), encode(longest)) == longest
    reply = LookupReply(num_blocks=MAX_KEYS, beneath=tuple(range(MAX_KEYS)))
    assert len(encode(reply)) < MAX_PAYLOAD_BYTES // 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("keys", "AAAA"),
        ("keys", "not base64!"),
        ("keys", [1, 2]),
        ("keys", "A" * 64 * ((MAX_KEYS + 3) // 3)),
        ("parent", "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"),
        ("parent", "AAAA"),
        ("first_block", -1),
        ("remaining_s", "NaN"),
        ("worker", "a.b"),
        ("surplus", 1),
    ],
)
def test_what_is_no_offer_is_not_read_as_one(field: str, value: object) -> None:
    body = json.loads(encode(OFFER)) | {field: value}
    with pytest.raises(MalformedMessage):
        decode(Offer, json.dumps(body).encode())


def test_a_key_is_named_once() -> None:
    with pytest.raises(ValueError, match="twice"):
        LOOKUP.model_validate(LOOKUP.model_dump() | {"keys": KEYS * 2})
