"""What the gateway counts about the requests it answers. The registry is the process's own, never the global one."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_LONG_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class HttpMetrics:
    """Registers itself once per registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "baton_http_requests",
            "Answers by route and status; 499: the client left.",
            ["route", "status"],
            registry=registry,
        )
        self.errors = Counter("baton_http_errors", "Failures by code, in streams too.", ["code"], registry=registry)
        self.active = Gauge("baton_http_active_requests", "Generation requests in hand.", registry=registry)
        self.paths = Counter(
            "baton_http_paths", "Generations by the way their prompt state came.", ["path"], registry=registry
        )
        self.tokens = Counter("baton_http_tokens", "Tokens read and written.", ["kind"], registry=registry)
        self.first_token_s = Histogram(
            "baton_time_to_first_token_seconds",
            "From the request to its first token.",
            buckets=_LONG_S,
            registry=registry,
        )
        self.token_gap_s = Histogram(
            "baton_inter_token_seconds",
            "Between tokens of a choice, per token.",
            buckets=_SHORT_S,
            registry=registry,
        )
        self.duration_s = Histogram(
            "baton_request_seconds",
            "From a generation request to its end.",
            buckets=_LONG_S,
            registry=registry,
        )
