"""Which format P sends a prompt's state in, and what D takes."""

from typing import Any

import pytest

from services.decode.flow import _check_record
from services.decode.ticket import DecodeTicket
from services.prefill.wire_choice import WireChoice
from shared.protocol.messages import Commit, FirstToken, OnWire, Prefill, Reserve, SamplingSpec
from shared.protocol.reports import LinkAddress
from shared.protocol.wire import KvPrecision
from shared.runtime.clock import LoopClock
from shared.runtime.counters import Counters
from shared.runtime.errors import ProtocolError
from shared.state.components import IndexKind, StateComponent
from shared.state.layout import PoolLayout
from shared.transfer.fake import FakeLink, FakeNetwork
from shared.transfer.formats.catalog import LOSSINESS

KV = StateComponent("kv", IndexKind.PAGE, 16, (2, 3), (64,), "float32", tuple(range(30)))
ALL = tuple(LOSSINESS)
PROMPT = tuple(range(1000))
MBIT = 1e6 / 8


class MeasuredLink(FakeLink):
    """Its sidecar speaks all formats, and has measured the link to everybody at `rate_now`."""

    rate_now: float | None = None

    @property
    def address(self) -> LinkAddress:
        return peer(*ALL)

    def rate(self, peer: LinkAddress) -> float | None:
        return self.rate_now


def peer(*formats: str) -> LinkAddress:
    return LinkAddress(boot_id="b", host="h", port=1, socket="", backends=("tcp",), formats=formats)


def order(precision: KvPrecision) -> Prefill:
    return Prefill(**TICKET, decode="d0-b", kv_precision=precision)


TICKET: dict[str, Any] = {
    "room": 5,
    "generation": 1,
    "request_id": "r",
    "gateway": "g0-b",
    "identity": "same",
    "prompt": PROMPT,
    "sampling": SamplingSpec(),
    "remaining_s": 9.0,
}


@pytest.fixture
def link() -> MeasuredLink:
    layout = PoolLayout((KV,), 4, 1)
    return MeasuredLink(FakeNetwork(), layout, memoryview(bytearray(layout.total_bytes)))


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def wire(link: MeasuredLink, counters: Counters) -> WireChoice:
    return WireChoice(PoolLayout((KV,), 4, 1), link, counters)


@pytest.mark.parametrize("name", ALL)
def test_what_is_asked_for_and_there_is_taken(wire: WireChoice, counters: Counters, name: KvPrecision) -> None:
    assert wire.choose(order(name), peer(*ALL)) == name
    assert counters[f"kv_precision_{name}"] == 1
    assert counters["wire_format_fallbacks"] == 0


@pytest.mark.parametrize("name", [name for name in ALL if name != "raw"])
def test_what_is_not_there_becomes_exact_and_is_counted(
    wire: WireChoice, counters: Counters, name: KvPrecision
) -> None:
    assert wire.choose(order(name), peer("raw")) == "raw"
    assert counters["wire_format_fallbacks"] == 1
    if LOSSINESS[name]:
        assert wire.choose(order(name), peer("raw", "lossless")) == "lossless"
        assert counters["wire_format_fallbacks"] == 2


def test_auto_loses_nothing_while_it_knows_nothing(wire: WireChoice, link: MeasuredLink) -> None:
    assert wire.choose(order("auto"), peer(*ALL)) == "lossless"
    link.rate_now = 1 * MBIT
    assert wire.choose(order("auto"), peer(*ALL)) == "lossless", "how long the prefill takes is not known yet"
    wire.computed(1000, 1.0)
    link.rate_now = None
    assert wire.choose(order("auto"), peer(*ALL)) == "lossless"


@pytest.mark.parametrize(
    ("mbit_per_s", "prefill_s", "expected"),
    [
        (100_000, 2.0, "raw"),  # 44 MiB: nothing is waited for
        (600, 2.0, "lossless"),
        (100, 2.0, "fp16"),
        (60, 2.0, "int8"),
        (100, 20.0, "lossless"),
        (5, 2.0, "delta"),
    ],
)
def test_auto_loses_something_where_the_bytes_are_waited_for(
    wire: WireChoice, link: MeasuredLink, mbit_per_s: float, prefill_s: float, expected: str
) -> None:
    link.rate_now = mbit_per_s * MBIT
    wire.computed(1000, prefill_s)
    assert wire.choose(order("auto"), peer(*ALL)) == expected
    assert wire.choose(order("lossless"), peer(*ALL)) == "lossless", "who wants every bit gets it over any link"
    assert LOSSINESS[wire.choose(order("auto"), peer("raw", "lossless"))] == 0


def test_the_pace_follows_the_newest_prompts(wire: WireChoice, link: MeasuredLink) -> None:
    link.rate_now = 100 * MBIT
    wire.computed(1000, 2.0)
    assert wire.choose(order("auto"), peer(*ALL)) == "fp16"
    for _ in range(30):
        wire.computed(1000, 20.0)
    assert wire.choose(order("auto"), peer(*ALL)) == "lossless"


def test_what_ran_is_counted(wire: WireChoice, counters: Counters) -> None:
    wire.ran(())
    wire.ran((OnWire(name="kv", wire_format="fp8", num_bytes=7), OnWire(name="s", wire_format="lossless", num_bytes=1)))
    assert {name: count for name, count in counters.as_dict().items() if name.startswith("wire")} == {
        "wire_format_fp8": 1
    }


@pytest.mark.parametrize(
    ("precision", "ran", "component", "fine"),
    [
        ("lossless", "raw", "raw", True),
        ("lossless", "fp8", "fp8", False),
        ("lossless", "raw", "int8", False),
        ("raw", "lossless", "lossless", True),
        ("raw", "fp16", "fp16", False),
        ("fp8", "fp8", "fp8", True),
        ("fp8", "int8", "int8", False),
        ("fp8", "lossless", "lossless", True),
        ("auto", "delta", "delta", True),
        ("auto", "zip", "zip", False),
    ],
)
async def test_d_takes_nothing_that_was_not_asked_for(
    precision: KvPrecision, ran: str, component: str, fine: bool
) -> None:
    reserve = Reserve(**TICKET, prefill="p0-b", kv_precision=precision)
    ticket = DecodeTicket(reserve, LoopClock(), Counters(), b"secret")
    record = Commit(
        room=5,
        generation=1,
        prefill="p0-b",
        prompt_len=len(PROMPT),
        first=(FirstToken(choice=0, token=3),),
        components=(),
        wire_format=ran,
        on_wire=(OnWire(name="kv", wire_format=component, num_bytes=1),),
    )
    if fine:
        _check_record(ticket, record)
    else:
        with pytest.raises(ProtocolError, match="asked for was"):
            _check_record(ticket, record)
