"""What the gateway says of itself in `/health`, from reports alone."""

from collections.abc import Callable

import pytest

from services.gateway.service import GatewayService
from shared.runtime.mode import Mode
from shared.runtime.settings import GatewaySettings
from tests.unit.gateway.reports import report

Gateway = Callable[..., GatewayService]


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Gateway:
    """One that is ready and reaches everybody, though it was never started."""

    def make(**settings: str) -> GatewayService:
        made = GatewayService(GatewaySettings(name="gateway", **settings))  # type: ignore[arg-type]
        monkeypatch.setattr(made, "bus_trouble", lambda: None)
        made.state = "ready"
        return made

    return make


async def test_it_needs_a_decode_worker_and_a_prefill_worker_where_the_path_is_remote(gateway: Gateway) -> None:
    remote = gateway(path="remote")
    assert remote.unhealthy() == "no decode worker is ready"
    remote.workers.observe(report("decode", "d0"))
    assert remote.unhealthy() == "no prefill worker is ready, and path is remote"
    remote.workers.observe(report("prefill", "p0"))
    assert remote.unhealthy() is None


@pytest.mark.parametrize(("ours", "theirs"), [("colocated", "separated"), ("separated", "chunked")])
async def test_it_is_not_well_while_a_worker_runs_in_another_mode(gateway: Gateway, ours: Mode, theirs: Mode) -> None:
    found = gateway(mode=ours)
    found.workers.observe(report("decode", "d0", settings={"mode": ours}))
    assert found.unhealthy() is None
    found.workers.observe(report("decode", "d1", settings={"mode": theirs}))
    assert found.unhealthy() == f"d1 runs in mode {theirs}, the gateway in mode {ours}"
    found.workers.observe(report("decode", "d1", settings={"mode": theirs}, state="draining", sequence=2))
    assert found.unhealthy() is None, "it is on its way out"
