"""What end-to-end tests share: one running cluster, since a start takes many times as long as a request."""

from collections.abc import Iterator

import pytest

from tests.support_cluster import RealCluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    """One prefill and one decode worker with default settings. Leave it as you found it: its processes live, and
    `settled`."""
    with RealCluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running
