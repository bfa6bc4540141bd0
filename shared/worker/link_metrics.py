"""A worker's sidecar in the worker's /metrics: it has no port of its own, and says what it has sent when it is asked
whether it lives."""

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, Metric

from shared.transfer.traffic import Sent


class LinkCollector:
    """`baton_link_sent_bytes_total{class, backend, component, format}`, and by class and backend
    `baton_link_transfers_total`, `baton_link_queue_seconds_total` and `baton_link_busy_seconds_total`: bytes by busy
    seconds are the rate."""

    def __init__(self, sent: Callable[[], tuple[Sent, ...]]) -> None:
        self._sent = sent

    def collect(self) -> Iterable[Metric]:
        by = ["class", "backend"]
        of_what = [*by, "component", "format"]
        num_bytes = CounterMetricFamily("baton_link_sent_bytes", "State that was sent, on the wire.", labels=of_what)
        transfers = CounterMetricFamily("baton_link_transfers", "Transfers that were confirmed.", labels=by)
        queue_s = CounterMetricFamily("baton_link_queue_seconds", "What transfers waited for their turns.", labels=by)
        busy_s = CounterMetricFamily("baton_link_busy_seconds", "What transfers took beyond that.", labels=by)
        for sums in self._sent():
            labels = [sums.traffic.value, sums.backend]
            for component, formats in sums.bytes.items():
                for name, count in formats.items():
                    num_bytes.add_metric([*labels, component, name], float(count))
            transfers.add_metric(labels, float(sums.transfers))
            queue_s.add_metric(labels, sums.queue_s)
            busy_s.add_metric(labels, sums.busy_s)
        return num_bytes, transfers, queue_s, busy_s
