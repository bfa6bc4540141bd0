"""A transfer over shared memory that goes on burst by burst and is refused or fenced says why, and permits that are
under way then are not taken for the next header."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shared.runtime.errors import TransferRefused
from shared.transfer.backend import ALWAYS, Manifest
from shared.transfer.grant import Grant
from tests.contract.test_transfer_backend import is_set
from tests.contract.test_transfer_bursts import LAYER_BYTES, PIECE, TABLE, Crossing, Two, until_landed
from tests.contract.transfer_links import new_ticket

BURST = LAYER_BYTES // 4
NUM_BURSTS = 12
REFUSALS: dict[str, Callable[[Manifest], Manifest]] = {
    "unknown_room": lambda manifest: replace(manifest, key=new_ticket()[0]),
    "bad_mac": lambda manifest: replace(manifest, secret=b"some other one's"),
    "bad_range": lambda manifest: replace(manifest, pieces=(replace(PIECE, first_unit=len(TABLE[0]) - 1),)),
}


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    monkeypatch.setattr("shared.transfer.shm._PART_BURSTS", 1)
    made = Two(tmp_path)
    yield made
    made.close()


def until_counted(two: Two, name: str) -> None:
    pause = threading.Event()
    for _ in range(3000):
        if two.receiver.door.snapshot()[1].get(name):
            return
        pause.wait(0.01)
    raise AssertionError(f"{name} is not counted: {two.receiver.door.snapshot()[1]}")


def is_said(two: Two, reason: str) -> bool:
    """Nothing but this refusal is counted."""
    counters = two.receiver.door.snapshot()[1]
    odd = {name for name in counters if name.startswith(("refused_", "failed_")) or name.endswith("_errors")}
    return odd == {f"refused_{reason}"} and counters[f"refused_{reason}"] == 1


def goes_well(two: Two) -> None:
    two.channel.close()
    two.channel = two.sender.backend.connect(two.receiver.address)
    two.channel.transfer(two.open(ALWAYS), is_set())


@pytest.mark.parametrize("reason", REFUSALS)
def test_who_is_refused_while_it_waits_for_its_turn_hears_why(two: Two, reason: str) -> None:
    crossing = Crossing(BURST)
    running = two.start(REFUSALS[reason](two.open(crossing)))
    crossing.wait_for(1)
    until_counted(two, f"refused_{reason}")
    crossing.let(NUM_BURSTS)
    with pytest.raises(TransferRefused, match=reason):
        running.result(60)
    assert len(crossing.asked) < NUM_BURSTS, "it goes on asking"
    goes_well(two)
    assert is_said(two, reason)


@pytest.mark.parametrize("reason", REFUSALS)
def test_who_is_refused_behind_its_permits_hears_why(two: Two, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are there before the header is looked at."""
    crossing, admit, may_look = Crossing(BURST), two.receiver.door.admit, threading.Event()

    def slow(*args: object) -> Grant:
        assert may_look.wait(60)
        return admit(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(two.receiver.door, "admit", slow)
    running = two.start(REFUSALS[reason](two.open(crossing)))
    crossing.let(NUM_BURSTS)
    crossing.wait_for(NUM_BURSTS)
    may_look.set()
    with pytest.raises(TransferRefused, match=reason):
        running.result(60)
    goes_well(two)
    assert is_said(two, reason)


def test_who_is_fenced_between_two_bursts_hears_it(two: Two) -> None:
    crossing = Crossing()
    manifest = two.open(crossing)
    running = two.start(manifest)
    crossing.let(1)
    crossing.wait_for(2)
    until_landed(two, 0)
    quiesced = threading.Event()
    two.receiver.door.fence(manifest.key, quiesced.set)
    assert quiesced.wait(60)
    until_counted(two, "refused_fenced")
    crossing.let(2)
    with pytest.raises(TransferRefused, match="fenced"):
        running.result(60)
    assert len(crossing.asked) == 2, "it goes on asking"
    assert two.untouched_layers()[1:] == [True, True]
    goes_well(two)
    assert is_said(two, "fenced")
