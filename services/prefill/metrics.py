"""What P counts about its hand-offs: how long they were on their way, and how much of that the client waited for."""

from prometheus_client import CollectorRegistry, Histogram

from shared.protocol.messages import PrefillTimings

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_PARTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)


class HandoffMetrics:
    """Registers itself once per registry. Hand-offs that moved nothing are not counted."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._exposed_s = Histogram(
            "baton_handoff_exposed_seconds",
            "From the end of a prompt's compute until the last of its state was confirmed.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._moved_s = Histogram(
            "baton_handoff_moving_seconds",
            "How long state of a prompt was on its way.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._overlap = Histogram(
            "baton_handoff_overlap_efficiency",
            "Part of the transfer that was hidden behind the compute, of what could have been: 1 is all.",
            buckets=_PARTS,
            registry=registry,
        )

    def observe(self, timings: PrefillTimings) -> None:
        if not timings.moved_s:
            return
        self._exposed_s.observe(timings.transfer_s)
        self._moved_s.observe(timings.moved_s)
        if (overlap := timings.overlap) is not None:
            self._overlap.observe(overlap)
