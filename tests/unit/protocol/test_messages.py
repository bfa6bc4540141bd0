"""Whatever arrives, `decode` gives a message or MalformedMessage; what is large still fits into a message."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from shared.bus.base import MAX_PAYLOAD_BYTES
from shared.protocol.messages import (
    DestinationReply,
    Prefill,
    ReplayReply,
    ReplayStatus,
    Reserve,
    SamplingSpec,
    TokenEntry,
    TokenLogprob,
    Tokens,
    Verdict,
)
from shared.protocol.packing import pack_bytes, pack_ints, unpack_bytes, unpack_ints
from shared.protocol.reports import WorkerReport
from shared.protocol.stream_messages import HandOver
from shared.protocol.wire import MalformedMessage, WireModel, decode, encode

INT32 = st.integers(-(1 << 31), (1 << 31) - 1)
GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.json"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


_ON_THE_BUS = ("shared.protocol.messages", "shared.protocol.reports", "shared.protocol.stream_messages")


def kinds_by_name(base: type[WireModel] = WireModel) -> dict[str, type[WireModel]]:
    found = {base.model_fields["kind"].default: base} if "kind" in base.model_fields else {}
    for sub in base.__subclasses__():
        if sub.__module__ in _ON_THE_BUS:  # a sidecar's control messages are not
            found |= kinds_by_name(sub)
    return found


KINDS = kinds_by_name()


def reserve(prompt: tuple[int, ...]) -> Reserve:
    return Reserve(
        room=1,
        generation=1,
        request_id="req-00",
        gateway="g-1",
        prefill="p-1",
        identity="i",
        prompt=prompt,
        sampling=SamplingSpec(),
        remaining_s=1,
    )


def decode_or_malformed(kind: type[WireModel], data: bytes) -> WireModel | None:
    try:
        return decode(kind, data)
    except MalformedMessage:
        return None


@given(st.sampled_from(sorted(KINDS)), st.binary(max_size=200))
@example("verdict", b"")
@example("verdict", b"\xff\xfe")
@example("verdict", b'{"ok": "\\ud800"}')
@example("verdict", b"[" * 100_000)
@example("fail", b'{"room": ' + b"9" * 5000 + b"}")
def test_arbitrary_bytes_are_malformed_and_nothing_else(kind: str, data: bytes) -> None:
    assert decode_or_malformed(KINDS[kind], data) is None


@st.composite
def mutated(draw: st.DrawFn) -> tuple[type[WireModel], bytes]:
    """A golden message with one place changed: replaced, removed, added or cut off."""
    document = json.loads(draw(st.sampled_from(GOLDEN)).read_text())
    kind = KINDS[document["kind"]]
    place: Any = document
    while True:
        keys = sorted(place) if isinstance(place, dict) else list(range(len(place)))
        key = draw(st.sampled_from(keys))
        if isinstance(place[key], dict | list) and place[key] and draw(st.booleans()):
            place = place[key]
            continue
        break
    how = draw(st.sampled_from(["replace", "remove", "add", "cut"]))
    if how == "replace":
        place[key] = draw(JSON)
    elif how == "remove":
        del place[key]
    elif how == "add" and isinstance(place, dict):
        place[draw(st.text(max_size=8))] = draw(JSON)
    data = json.dumps(document).encode()
    return kind, data[: draw(st.integers(0, len(data)))] if how == "cut" else data


@given(mutated())
def test_a_mutated_message_is_malformed_or_makes_sense(case: tuple[type[WireModel], bytes]) -> None:
    kind, data = case
    message = decode_or_malformed(kind, data)
    if message is not None:
        again = decode(kind, encode(message))
        assert encode(again) == encode(message)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (Verdict, b'{"ok": true, "surprise": 1}'),
        (Verdict, b'{"kind": "commit_reply", "ok": true}'),
        (Verdict, b'{"v": 2, "ok": true}'),
        (Verdict, b'{"ok": true, "retry_after_s": -1}'),
        (Verdict, b'{"ok": true, "retry_after_s": NaN}'),
        (DestinationReply, b'{"status": "maybe"}'),
        (HandOver, b'{"stream": "0", "gateway": "g"}'),
        (HandOver, b'{"stream": "' + b"A" * 32 + b'", "gateway": "g"}'),
        (HandOver, b'{"stream": "' + b"a" * 32 + b'", "gateway": "g.>"}'),
        (Reserve, encode(reserve((1,))).replace(b'"room":1', b'"room":0')),
        (Reserve, encode(reserve((1,))).replace(b'"room":1', b'"room":9223372036854775808')),
        (Reserve, encode(reserve((1,))).replace(b'"generation":1', b'"generation":0')),
        (Reserve, encode(reserve((1,))).replace(b'"AQAAAA=="', b'"AQAAAA"')),
        (Reserve, encode(reserve((1,))).replace(b'"AQAAAA=="', b'"AQAA"')),
        (Reserve, encode(reserve((1,))).replace(b'"AQAAAA=="', b"[4294967296]")),
        (Reserve, encode(reserve((1,))).replace(b'"AQAAAA=="', b"[1.5]")),
        (Reserve, encode(reserve((1,))).replace(b'"AQAAAA=="', b"[true]")),
        (Reserve, encode(reserve((1,))).replace(b'"AQAAAA=="', '"é"'.encode())),
    ],
)
def test_closed_versioned_and_bounded(kind: type[WireModel], data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode(kind, data)


def test_messages_do_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Verdict(ok=True).ok = False  # type: ignore[misc]


@given(st.lists(INT32, max_size=50).map(tuple))
def test_packed_ints_round_trip(values: tuple[int, ...]) -> None:
    assert unpack_ints(pack_ints(values)) == values
    assert unpack_ints(list(values)) == values
    message = decode(Reserve, encode(reserve(values)))
    assert message.prompt == values


@given(st.binary(max_size=100))
def test_packed_bytes_round_trip(value: bytes) -> None:
    assert unpack_bytes(pack_bytes(value)) == value


@pytest.mark.parametrize("value", ["AQI", "A-==", "é", 5, None])
def test_what_is_not_base64_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"base64|ASCII"):
        unpack_bytes(value)


@pytest.mark.parametrize("values", [(1 << 31,), (-(1 << 31) - 1,)])
def test_ids_beyond_32_bits_are_refused_before_they_are_sent(values: tuple[int, ...]) -> None:
    with pytest.raises(ValidationError):
        reserve(values)


@pytest.mark.parametrize("logprob", [-0.5, float("-inf"), -1e30])
def test_log_probabilities_round_trip_minus_infinity_included(logprob: float) -> None:
    entry = TokenEntry(room=1, generation=1, choice=0, index=0, tokens=(1,), logprobs=(TokenLogprob(logprob=logprob),))
    read = decode(Tokens, encode(Tokens(sender="d", entries=(entry,))))
    assert read.entries[0].logprobs[0].logprob == logprob
    assert math.isinf(read.entries[0].logprobs[0].logprob) == math.isinf(logprob)


def test_long_prompts_fit() -> None:
    prompt = tuple(range(151_000 - 100_000, 151_000))
    assert len(encode(reserve(prompt))) < MAX_PAYLOAD_BYTES
    prefill = Prefill(
        room=1,
        generation=1,
        request_id="req-00",
        gateway="g-1",
        decode="d-1",
        identity="i",
        prompt=prompt[:8192],
        sampling=SamplingSpec(logit_bias=tuple((i, 1.0) for i in range(300))),
        remaining_s=1,
    )
    assert len(encode(prefill)) < 64 * 1024


def entry(num_tokens: int, num_logprobs: int, choice: int = 0) -> TokenEntry:
    top = tuple((150_000 + i, -12.345678901234567) for i in range(num_logprobs))
    logprobs = (TokenLogprob(logprob=-12.345678901234567, top=top),) * num_tokens if num_logprobs else ()
    tokens = (150_000,) * num_tokens
    return TokenEntry(room=(1 << 63) - 1, generation=1, choice=choice, index=100_000, tokens=tokens, logprobs=logprobs)


def test_a_step_of_a_full_batch_fits() -> None:
    step = Tokens(sender="d-1", entries=tuple(entry(1, 20, choice) for choice in range(128)) * 8)
    assert len(encode(step)) < MAX_PAYLOAD_BYTES


def test_a_replay_of_many_tokens_fits() -> None:
    """With all 20 logprobs only some 1,500 tokens do: who answers a replay must split it."""
    assert len(encode(ReplayReply(status=ReplayStatus.LIVE, entries=(entry(100_000, 0),)))) < MAX_PAYLOAD_BYTES
    assert len(encode(ReplayReply(status=ReplayStatus.LIVE, entries=(entry(1_500, 20),)))) < MAX_PAYLOAD_BYTES
    assert len(encode(ReplayReply(status=ReplayStatus.LIVE, entries=(entry(2_500, 20),)))) > MAX_PAYLOAD_BYTES


def test_a_report_names_its_peer() -> None:
    report = WorkerReport(role="decode", id="d0", boot_id="aaaa0001", pid=1, host="h")
    assert report.peer == "d0-aaaa0001"
