"""The wire as files: a change of any message shows as a change in `golden/`.

After an intended change: BATON_UPDATE_GOLDEN=1 python -m pytest tests/unit/protocol/test_golden.py
"""

import json
import os
from pathlib import Path

import pytest

from shared.protocol.messages import (
    Cancel,
    Commit,
    CommitReply,
    CommitStatus,
    ComponentDigest,
    Destination,
    DestinationReply,
    DestinationStatus,
    Fail,
    FinishReason,
    FirstToken,
    OnWire,
    Ping,
    Prefill,
    PrefillTimings,
    Replay,
    ReplayReply,
    ReplayStatus,
    Reserve,
    RollCall,
    RollCallReply,
    SamplingSpec,
    TicketTimings,
    TokenEntry,
    TokenLogprob,
    Tokens,
    Verdict,
)
from shared.protocol.reports import Geometry, LinkAddress, Pages, WorkerReport
from shared.protocol.stream_messages import (
    HandOver,
    StreamFailure,
    StreamPart,
    StreamProgress,
    StreamPrompt,
    StreamRequest,
    StreamState,
    StreamTicket,
    StreamTokens,
)
from shared.protocol.wire import WireModel, decode, encode

GOLDEN = Path(__file__).parent / "golden"
UPDATE = "BATON_UPDATE_GOLDEN"

ROOM = (1 << 63) - 1
LINK = LinkAddress(
    boot_id="aaaa0001",
    host="10.0.0.7",
    port=7301,
    socket="d0-aaaa0001.sock",
    backends=("shm", "tcp"),
    formats=("raw", "lossless", "fp8"),
)
GEOMETRY = Geometry(page_tokens=16, components=("kv",), unit_bytes=(2304,))
SAMPLING = SamplingSpec(
    seed=(1 << 64) - 1,
    n=2,
    max_tokens=64,
    min_tokens=1,
    temperature=0.7,
    top_k=40,
    top_p=0.9,
    min_p=0.05,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    repetition_penalty=1.1,
    logit_bias=((7, -100.0),),
    stop_token_ids=(2, 3),
    ignore_eos=True,
    logprobs=2,
)
LOGPROB = TokenLogprob(logprob=-0.25, top=((17, -0.25), (4, float("-inf"))))
ENTRY = TokenEntry(
    room=ROOM,
    generation=2,
    choice=1,
    index=3,
    tokens=(17, 4),
    logprobs=(LOGPROB, LOGPROB),
    finish=FinishReason.STOP,
)

SAMPLES: dict[str, WireModel] = {
    "reserve": Reserve(
        room=ROOM,
        generation=1,
        request_id="req-00",
        gateway="g0-cccc0001",
        prefill="p0-bbbb0001",
        identity="sha256:1234",
        prompt=(1, 2, 151_000),
        sampling=SAMPLING,
        remaining_s=29.5,
        waited_s=0.5,
        kv_precision="fp8",
    ),
    "reserve_resumed": Reserve(
        room=ROOM,
        generation=2,
        request_id="req-00",
        gateway="g0-cccc0001",
        prefill="p0-bbbb0001",
        identity="sha256:1234",
        prompt=(1, 2, 151_000),
        sampling=SAMPLING,
        remaining_s=29.5,
        history=((17, 4, 150_999), ()),
        finished=(0,),
    ),
    "reserve_local": Reserve(
        room=1,
        generation=1,
        request_id="req-00",
        gateway="g0-cccc0001",
        prefill=None,
        identity="sha256:1234",
        prompt=(1,),
        sampling=SamplingSpec(),
        remaining_s=0.0,
    ),
    "reserve_stored": Reserve(
        room=ROOM,
        generation=3,
        request_id="req-00",
        gateway="g0-cccc0001",
        prefill=None,
        identity="sha256:1234",
        prompt=(1, 2, 151_000),
        sampling=SAMPLING,
        remaining_s=29.5,
        history=((17, 4, 150_999),),
        salt="tenant-a",
        load=True,
        load_least=128,
    ),
    "prefill": Prefill(
        room=ROOM,
        generation=1,
        request_id="req-00",
        gateway="g0-cccc0001",
        decode="d0-aaaa0001",
        identity="sha256:1234",
        prompt=(1, 2, 151_000),
        sampling=SAMPLING,
        remaining_s=29.5,
        waited_s=0.5,
        kv_precision="fp8",
    ),
    "prefill_resumed": Prefill(
        room=ROOM,
        generation=2,
        request_id="req-00",
        gateway="g0-cccc0001",
        decode="d0-aaaa0001",
        identity="sha256:1234",
        prompt=(1, 2, 151_000),
        sampling=SAMPLING,
        remaining_s=29.5,
        resumed=True,
    ),
    "verdict": Verdict(ok=True),
    "verdict_no": Verdict(ok=False, code="ticket_denied", message="no pages", retry_after_s=1.5),
    "destination": Destination(
        room=ROOM,
        generation=1,
        decode="d0-aaaa0001",
        identity="sha256:1234",
        geometry=GEOMETRY,
        link=LINK,
        secret=bytes(range(16)),
    ),
    "destination_reply": DestinationReply(status=DestinationStatus.ACCEPTED),
    "destination_reply_refused": DestinationReply(
        status=DestinationStatus.REFUSED, code="identity_mismatch", message="other weights"
    ),
    "commit": Commit(
        room=ROOM,
        generation=1,
        prefill="p0-bbbb0001",
        prompt_len=3,
        first=(
            FirstToken(choice=0, token=17, logprob=LOGPROB),
            FirstToken(choice=1, token=2, finish=FinishReason.LENGTH),
        ),
        components=(ComponentDigest(name="kv", num_bytes=6912, digest="00ff"),),
        wire_format="fp8",
        on_wire=(OnWire(name="kv", wire_format="fp8", num_bytes=1836),),
        timings=PrefillTimings(queue_s=0.001, prefill_s=0.25, transfer_s=0.002, backend="shm"),
    ),
    "commit_reply": CommitReply(status=CommitStatus.COMMITTED),
    "commit_reply_failed": CommitReply(status=CommitStatus.FAILED, code="corrupt_state", message="digests disagree"),
    "tokens": Tokens(
        sender="d0-aaaa0001",
        entries=(ENTRY,),
        timings=(
            (
                ROOM,
                TicketTimings(
                    queue_s=0.002,
                    prefill_s=0.25,
                    transfer_s=0.002,
                    commit_s=0.001,
                    bytes=(("kv", 6912),),
                    wire_format="fp8",
                    wire_bytes=(("kv", 1836),),
                    backend="shm",
                    load_s=0.01,
                    loaded_tokens=128,
                ),
            ),
        ),
        stored=((ROOM, 128),),
    ),
    "replay": Replay(room=ROOM, generation=2, wanted=((0, 0), (1, 5))),
    "replay_reply": ReplayReply(status=ReplayStatus.LIVE, entries=(ENTRY,)),
    "replay_reply_ended": ReplayReply(
        status=ReplayStatus.ENDED, code="corrupt_state", message="digests disagree", by="decode"
    ),
    "ping": Ping(),
    "roll_call": RollCall(sender="d0-aaaa0001", rooms=(1, ROOM)),
    "roll_call_reply": RollCallReply(gone=(ROOM,)),
    "replay_adopted": Replay(room=ROOM, generation=2, wanted=((0, 5),), gateway="g1-cccc0002", epoch=17),
    "hand_over": HandOver(stream="0123456789abcdef" * 2, gateway="g1-cccc0002"),
    "stream_request": StreamRequest(
        request_id="req-00",
        key="00ff",
        tenant="tenant-a",
        chat=True,
        model="smollm2",
        created=1_700_000_000,
        prompts=(StreamPrompt(prompt=(1, 2, 151_000), sampling=SAMPLING, echo="Once"),),
        n=2,
        stops=("STOP",),
        include_usage=True,
        timings=True,
        path="remote",
        priority=-1,
        cache_salt="word",
    ),
    "stream_part": StreamPart(choices=(StreamTokens(tokens=(17, 4), logprobs=(LOGPROB, LOGPROB)), StreamTokens())),
    "stream_state": StreamState(
        owner="g0-cccc0001",
        parts=("0a1b2c3d",),
        choices=(
            StreamTokens(tokens=(17,), logprobs=(LOGPROB,), finish=FinishReason.LENGTH),
            StreamTokens(tokens=(4,), stopped=True),
        ),
        progress=(
            StreamProgress(
                identity="sha256:1234",
                path="remote",
                stored=128,
                ticket=StreamTicket(room=ROOM, generation=2, decode="d0-aaaa0001"),
            ),
        ),
        remaining_s=29.5,
    ),
    "stream_state_failed": StreamState(
        owner="g0-cccc0001",
        choices=(StreamTokens(),),
        progress=(StreamProgress(timings='{"queue_s": 0.25}'),),
        remaining_s=0.0,
        failure=StreamFailure(code="engine_error", message="out of memory"),
    ),
    "cancel": Cancel(room=ROOM, generation=2, reason="client_gone"),
    "cancel_choice": Cancel(room=ROOM, generation=2, reason="stop_string", choice=1),
    "cancel_adopted": Cancel(room=ROOM, generation=2, reason="client_gone", epoch=17),
    "fail": Fail(
        room=ROOM, generation=2, sender="p0-bbbb0001", code="engine_error", message="out of memory", by="prefill"
    ),
    "heartbeat": WorkerReport(
        role="decode",
        id="d0",
        boot_id="aaaa0001",
        pid=4711,
        host="10.0.0.7",
        http_port=9101,
        state="ready",
        model="smollm2",
        identity="sha256:1234",
        geometry=GEOMETRY,
        link=LINK,
        max_model_len=8192,
        pages=Pages(total=100, free=90, quarantined=1, in_tickets=9),
        slots=Pages(total=16, free=15, in_tickets=1),
        queues={"waiting": 1},
        tickets={"started": 2},
        counters={"tokens": 12.0},
        settings={"transfer": "auto", "threads": 2, "ratio": 0.5, "strict": False, "store": None},
        sequence=12,
    ),
    "heartbeat_gateway": WorkerReport(role="gateway", id="g0", boot_id="cccc0001", pid=1, host="127.0.0.1"),
}


_ON_THE_BUS = ("shared.protocol.messages", "shared.protocol.reports", "shared.protocol.stream_messages")


def kinds_of_message(base: type[WireModel] = WireModel) -> list[type[WireModel]]:
    found = [base] if "kind" in base.model_fields else []
    for sub in base.__subclasses__():
        if sub.__module__ in _ON_THE_BUS:  # a sidecar's control messages are not
            found += kinds_of_message(sub)
    return found


def as_text(message: WireModel) -> str:
    return json.dumps(json.loads(encode(message)), indent=2, ensure_ascii=False) + "\n"


@pytest.mark.parametrize("name", SAMPLES)
def test_the_wire_has_not_changed(name: str) -> None:
    path = GOLDEN / f"{name}.json"
    text = as_text(SAMPLES[name])
    if os.environ.get(UPDATE) == "1":
        path.write_text(text)
    assert path.exists(), f"no golden file for {name}; make it with {UPDATE}=1"
    assert text == path.read_text(), f"the wire changed; if that is meant, run this file with {UPDATE}=1"


@pytest.mark.parametrize("name", SAMPLES)
def test_golden_files_are_read_as_what_was_written(name: str) -> None:
    sample = SAMPLES[name]
    assert decode(type(sample), (GOLDEN / f"{name}.json").read_bytes()) == sample


def test_every_message_has_a_golden_file_and_every_file_a_message() -> None:
    assert {type(sample) for sample in SAMPLES.values()} == set(kinds_of_message())
    assert {path.stem for path in GOLDEN.glob("*")} == set(SAMPLES)


def test_kinds_are_distinct_and_versioned() -> None:
    kinds = [kind.model_fields["kind"].default for kind in kinds_of_message()]
    assert len(set(kinds)) == len(kinds)
    assert all("v" in kind.model_fields for kind in kinds_of_message())
