"""What the gateway leaves alone is shown where people look: in its report, its metrics, and /cluster."""

from services.gateway.service import GatewayService
from shared.protocol.reports import WorkerReport
from shared.runtime.settings import GatewaySettings
from shared.runtime.telemetry import render_metrics


async def test_open_breakers_are_shown() -> None:
    gateway = GatewayService(GatewaySettings(name="gateway"))
    for name in ("d0", "d1"):
        gateway.workers.observe(WorkerReport(role="decode", id=name, boot_id="b0", pid=1, host="h", state="ready"))
    now = gateway.clock.now()
    for _ in range(3):
        gateway.rooms.breakers.failed(("d1-b0", "decode"), now, began_at=now)
    report = gateway.report()
    assert report.queues["breakers_open"] == 1
    assert report.counters["breakers_opened"] == 1
    shown = {worker["id"]: worker["breakers"] for worker in gateway.cluster()["workers"]}
    assert shown == {"d0": {}, "d1": {"decode": "open"}}
    metrics = render_metrics(gateway.registry)[0].decode()
    assert 'baton_queue_length{queue="breakers_open"} 1.0' in metrics
    assert "baton_breakers_opened_total 1.0" in metrics
