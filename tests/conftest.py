"""What every kind of test may use: a real NATS server, and how thorough property tests are."""

import asyncio
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

import shared.engine  # noqa: F401  before any test imports torch: it sets how idle threads wait
from shared.bus.server import NatsServer

settings.register_profile("ci", max_examples=50, stateful_step_count=30, deadline=None, derandomize=True)
settings.register_profile("deep", max_examples=2000, stateful_step_count=60, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A NATS server of this test session alone, on a free port. Tests keep apart by their subjects."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    asyncio.run(server.start())
    yield server.url
    asyncio.run(server.stop())
