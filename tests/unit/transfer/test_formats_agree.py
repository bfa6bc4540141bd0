"""What a request's state may travel as. What loses something only where it was asked for, whatever the peers have."""

import itertools
from typing import get_args

import pytest

from shared.protocol.messages import OnWire
from shared.protocol.reports import LinkAddress
from shared.protocol.wire import KvPrecision
from shared.transfer.control import Reply
from shared.transfer.formats.agree import EXACT_FORMATS, accepted, agree, common, ran, together
from shared.transfer.formats.catalog import LOSSINESS, available, format_for, offered, travels_as
from shared.transfer.link import TicketKey
from shared.transfer.wire_book import WireBook
from tests.unit.transfer.formats_rows import FLOATS, RING, SLOTS, kv

PRECISIONS: tuple[KvPrecision, ...] = get_args(KvPrecision)


def test_precisions_are_the_formats_and_auto() -> None:
    assert set(PRECISIONS) == {*LOSSINESS, "auto"}
    assert EXACT_FORMATS == ("raw", "lossless")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_nothing_is_lost_that_was_not_asked_for(precision: KvPrecision) -> None:
    names = tuple(LOSSINESS)
    for ours, theirs in itertools.product(
        [(), ("raw",), names, ("raw", "fp8"), ("lossless", "int8", "delta")], repeat=2
    ):
        usable = common(precision, ours, theirs)
        assert "raw" in usable
        for name in usable:
            assert not LOSSINESS[name] or name == precision or precision == "auto"
            assert name == "raw" or (name in ours and name in theirs)
        if precision == "auto":
            continue
        agreed = agree(precision, ours, theirs)
        assert agreed.name in usable
        assert agreed.name in accepted(precision)
        assert agreed.instead is (agreed.name != precision)
        if agreed.instead:
            assert not LOSSINESS[agreed.name]


def test_an_exact_stand_in_is_the_smaller_one() -> None:
    assert agree("fp8", ("lossless", "fp8"), ("lossless",)).name == "lossless"
    assert agree("fp8", ("lossless", "fp8"), ("fp8",)).name == "raw", "what fp8 does not take would travel lossless"
    assert agree("raw", LOSSINESS, LOSSINESS).name == "raw"


@pytest.mark.parametrize("name", LOSSINESS)
@pytest.mark.parametrize("component", [kv("float32"), kv("float16"), kv("uint8"), SLOTS, RING], ids=lambda c: c.dtype)
def test_what_a_component_travels_as_is_known_without_the_format(name: str, component: object) -> None:
    assert travels_as(name, component) == format_for(name, component).name  # type: ignore[arg-type]
    if component in [kv(dtype) for dtype in FLOATS] and not (name == "fp16" and component == kv("float16")):
        assert travels_as(name, component) == name


def test_what_is_offered() -> None:
    assert offered("") == available()
    assert offered(" fp8 ,lossless") == ("raw", "lossless", "fp8")
    with pytest.raises(ValueError, match="no wire format is called zip"):
        offered("raw,zip")


def of(name: str, wire_format: str, num_bytes: int) -> OnWire:
    return OnWire(name=name, wire_format=wire_format, num_bytes=num_bytes)


def test_one_name_for_all_that_ran() -> None:
    assert ran(()) == "raw"
    assert ran((of("kv", "raw", 5),)) == "raw"
    assert ran((of("kv", "fp8", 5), of("slots", "lossless", 2))) == "fp8"
    assert ran((of("kv", "raw", 5), of("slots", "lossless", 2))) == "lossless"
    assert ran((of("kv", "raw", 5), of("slots", "fp8", 0))) == "raw", "nothing of it travelled"
    assert together(of("kv", "raw", 5), of("kv", "int8", 2)) == of("kv", "int8", 7)


def test_a_ticket_s_transfers_add_up_and_are_forgotten() -> None:
    book, key = WireBook(), TicketKey(7, 1)
    peer = LinkAddress(boot_id="b1", host="h", port=1, socket="", backends=("tcp",))
    for rate in (None, 100.0, 50.0):
        book.sent(key, peer, Reply(id=1, on_wire=(of("kv", "int8", 10), of("slots", "lossless", 1)), bytes_per_s=rate))
    book.sent(TicketKey(7, 2), peer, Reply(id=1, on_wire=(of("kv", "raw", 4),)))
    assert book.of(key) == (of("kv", "int8", 30), of("slots", "lossless", 3))
    assert book.rate(peer) == 75.0, "smoothed"
    assert book.rate(peer.model_copy(update={"boot_id": "b2"})) is None, "a restart is another peer"
    book.forget(key)
    assert book.of(key) == ()
    assert book.of(TicketKey(7, 2)) == (of("kv", "raw", 4),)
