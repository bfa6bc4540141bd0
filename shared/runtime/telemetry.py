"""What a process says about itself: log lines for people (or JSON for machines) and Prometheus metrics.

The gauges of pages, queues and tickets are read out of the process's own report at each scrape, so that /metrics,
/cluster and the heartbeat can never disagree.
"""

import json
import logging
import re
import sys
import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from shared.protocol.reports import Pages, WorkerReport
from shared.runtime.log_limit import RepeatLimit

_NOT_A_NAME = re.compile(r"[^a-z0-9_]")


class _HumanFormatter(logging.Formatter):
    def __init__(self, peer: str) -> None:
        super().__init__()
        self._peer = f" {peer}" if peer else ""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = f"{clock}.{int(record.msecs):03d} {record.levelname:<7}{self._peer} {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class _JsonFormatter(logging.Formatter):
    def __init__(self, peer: str) -> None:
        super().__init__()
        self._peer = peer

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "peer": self._peer,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def setup_logging(peer: str, level: str, style: str = "human") -> None:
    """Replaces the root logger's handlers by one on stderr. style: human, bare (no peer) or json."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(peer) if style == "json" else _HumanFormatter(peer if style == "human" else ""))
    handler.addFilter(RepeatLimit())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("aiohttp.access", "asyncio", "nats"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))


class ReportCollector:
    """Turns a process's report into metrics: `baton_pages{kind}`, `baton_slots{kind}`, `baton_queue_length{queue}`,
    `baton_tickets{state}`, `baton_stashed_bytes`, `baton_ready`, and one `baton_<name>_total` for each of its
    counters."""

    def __init__(self, report: Callable[[], WorkerReport]) -> None:
        self._report = report

    def collect(self) -> Iterable[Metric]:
        report = self._report()
        ready = GaugeMetricFamily("baton_ready", "1 once requests can be served.", labels=["role", "id"])
        ready.add_metric([report.role, report.id], float(report.state == "ready"))
        yield ready
        yield from _pages("baton_pages", "Pages of the pool.", report.pages)
        yield from _pages("baton_slots", "Request slots of the pool.", report.slots)
        yield _gauge("baton_queue_length", "Requests or sequences by queue.", "queue", report.queues)
        yield _gauge("baton_tickets", "Tickets by state.", "state", report.tickets)
        yield GaugeMetricFamily("baton_stashed_bytes", "State kept in host memory.", value=report.stashed_bytes)
        for name, value in sorted(report.counters.items()):
            metric = f"baton_{_NOT_A_NAME.sub('_', name.lower())}".removesuffix("_total")
            yield CounterMetricFamily(metric, f"{name} since the start of the process.", value=value)


def new_registry(report: Callable[[], WorkerReport]) -> CollectorRegistry:
    """One registry a process, never the library's global one: tests run many services in one process."""
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    registry.register(ReportCollector(report))
    return registry


def render_metrics(registry: CollectorRegistry) -> tuple[bytes, str]:
    """The body and the Content-Type of a /metrics answer."""
    return generate_latest(registry), CONTENT_TYPE_LATEST


def _gauge(name: str, text: str, label: str, values: dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], float(value))
    return family


def _pages(name: str, text: str, pages: Pages | None) -> Iterable[Metric]:
    if pages is not None:
        yield _gauge(name, text, "kind", pages.model_dump())
