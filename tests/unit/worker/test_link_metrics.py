"""What /metrics says of a worker's transfers."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from services.prefill.metrics import HandoffMetrics
from shared.protocol.messages import OnWire, PrefillTimings
from shared.protocol.wire import FormatName
from shared.transfer.classes import TrafficClass
from shared.transfer.traffic import TrafficSums
from shared.worker.link_metrics import LinkCollector


def shown(registry: CollectorRegistry) -> dict[str, float]:
    lines = generate_latest(registry).decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#") and "_created" not in line)
    return {name: float(value) for name, value in pairs}


def on_wire(name: str, num_bytes: int, wire_format: FormatName = "raw") -> OnWire:
    return OnWire(name=name, wire_format=wire_format, num_bytes=num_bytes)


def test_transfers_by_class_backend_component_and_format() -> None:
    sums, registry = TrafficSums(), CollectorRegistry()
    registry.register(LinkCollector(sums.sent))
    assert shown(registry) == {}
    sums.add(
        TrafficClass.LAST,
        "shm",
        [on_wire("kv", 100), on_wire("kv", 20, "fp8"), on_wire("window", 3)],
        queue_s=0.25,
        busy_s=0.5,
    )
    sums.add(TrafficClass.LAST, "shm", [on_wire("kv", 1)], queue_s=0.25, busy_s=0.5)
    sums.add(TrafficClass.BACKGROUND, "tcp", [], queue_s=0.0, busy_s=0.125)
    last, background = 'class="last"', 'backend="tcp",class="background"'
    found = {name.replace('backend="shm",', ""): value for name, value in shown(registry).items()}
    assert found == {
        f'baton_link_sent_bytes_total{{{last},component="kv",format="fp8"}}': 20.0,
        f'baton_link_sent_bytes_total{{{last},component="kv",format="raw"}}': 101.0,
        f'baton_link_sent_bytes_total{{{last},component="window",format="raw"}}': 3.0,
        f"baton_link_transfers_total{{{last}}}": 2.0,
        f"baton_link_queue_seconds_total{{{last}}}": 0.5,
        f"baton_link_busy_seconds_total{{{last}}}": 1.0,
        f"baton_link_transfers_total{{{background}}}": 1.0,
        f"baton_link_queue_seconds_total{{{background}}}": 0.0,
        f"baton_link_busy_seconds_total{{{background}}}": 0.125,
    }
    assert sums.as_counters()["class_last_bytes"] == 124


@pytest.mark.parametrize(
    ("prefill_s", "exposed_s", "moved_s", "overlap"),
    [(4.0, 0.5, 2.0, 0.75), (1.0, 0.5, 2.0, 0.5), (2.0, 3.0, 3.0, 0.0), (2.0, 0.0, 0.0, None), (0.0, 1.0, 1.0, None)],
)
def test_hand_offs_that_moved_something_are_counted(
    prefill_s: float, exposed_s: float, moved_s: float, overlap: float | None
) -> None:
    registry = CollectorRegistry()
    timings = PrefillTimings(prefill_s=prefill_s, transfer_s=exposed_s, moved_s=moved_s)
    HandoffMetrics(registry).observe(timings)
    found = shown(registry)
    assert timings.overlap == overlap
    assert found["baton_handoff_exposed_seconds_count"] == (moved_s > 0)
    assert found["baton_handoff_exposed_seconds_sum"] == (exposed_s if moved_s else 0.0)
    assert found["baton_handoff_moving_seconds_sum"] == moved_s
    assert found["baton_handoff_overlap_efficiency_count"] == (overlap is not None)
    assert found["baton_handoff_overlap_efficiency_sum"] == (overlap or 0.0)
