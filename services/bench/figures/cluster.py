"""What a Baton cluster's own reports say of a run: queues, busy shares, pages, bytes. Pure; takes nothing on trust."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

_POOLS = ("prefill", "decode")
_SENT = "sent_"
_BYTES = "_bytes"


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """at_s: when the worker said so, in the run's time. counters only grow, and begin anew with another boot id."""

    role: str
    id: str
    boot_id: str
    at_s: float
    queues: dict[str, float]
    counters: dict[str, float]
    pages_total: float
    pages_free: float


@dataclass(frozen=True, slots=True)
class Spread:
    mean: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread | None":
        found = list(values)
        return cls(fmean(found), max(found)) if found else None


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """Of all workers of one role together. busy_share: of their time, how much they computed; 1 is all of them, all the
    time. queues: their lengths, over the samples. kv_use: the share of pages that were not free."""

    workers: int
    busy_share: float | None
    queues: dict[str, Spread]
    kv_use: Spread | None
    tokens_generated: float
    prompt_tokens_computed: float


@dataclass(frozen=True, slots=True)
class ClusterFigures:
    """moved_bytes: what sidecars sent, by transfer backend. gateway_cpu_share: of one core."""

    samples: int
    pools: dict[str, PoolFigures]
    gateway_queues: dict[str, Spread]
    moved_bytes: dict[str, float]
    gateway_cpu_share: float | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class ClusterHistory:
    """What was sampled in one run. last: what workers said after its end; it tells how far counters came, and nothing
    of queues and pages while there was a load. gateway_cpu_s: (time of the run, seconds of CPU) at its begin and its
    end."""

    samples: list[list[WorkerSample]] = field(default_factory=list)
    last: list[WorkerSample] = field(default_factory=list)
    gateway_cpu_s: list[tuple[float, float]] = field(default_factory=list)

    def figures(self) -> ClusterFigures | None:
        """None where nothing was seen."""
        if not self.samples:
            return None
        words = [*self.samples, self.last]
        return ClusterFigures(
            samples=len(self.samples),
            pools={role: pool for role in _POOLS if (pool := _pool(self.samples, words, role)) is not None},
            gateway_queues=_queues(self.samples, "gateway"),
            moved_bytes=_moved(words),
            gateway_cpu_share=_cpu_share(self.gateway_cpu_s),
        )


def read_cluster(body: Any, now_s: float) -> list[WorkerSample]:
    """The workers of a `/cluster` answer that came at now_s."""
    workers = body.get("workers") if isinstance(body, dict) else None
    return [_worker(each, now_s) for each in workers or [] if isinstance(each, dict)]


def read_cpu_s(metrics: str) -> float | None:
    """`process_cpu_seconds_total` of a `/metrics` answer."""
    for line in metrics.splitlines():
        name, _, value = line.partition(" ")
        if name == "process_cpu_seconds_total":
            return float(value)
    return None


def _worker(said: Mapping[str, Any], now_s: float) -> WorkerSample:
    pages = _numbers(said.get("pages"))
    return WorkerSample(
        role=str(said.get("role")),
        id=str(said.get("id")),
        boot_id=str(said.get("boot_id")),
        at_s=now_s - _numbers(said).get("age_s", 0.0),
        queues=_numbers(said.get("queues")),
        counters=_numbers(said.get("counters")),
        pages_total=pages.get("total", 0.0),
        pages_free=pages.get("free", 0.0),
    )


def _numbers(said: Any) -> dict[str, float]:
    """Those of an object's fields that are numbers."""
    found = said.items() if isinstance(said, Mapping) else ()
    return {str(name): float(value) for name, value in found if isinstance(value, int | float)}


def _pool(
    samples: Sequence[Sequence[WorkerSample]], words: Sequence[Sequence[WorkerSample]], role: str
) -> PoolFigures | None:
    """words: the samples and what was said after them."""
    most = max(sum(worker.role == role for worker in sample) for sample in samples)
    if not most:
        return None
    busy_s = seconds = 0.0
    for first, last in _spans(words, role):
        busy_s += _growth(first, last, "busy_seconds")
        seconds += last.at_s - first.at_s
    used = [
        1.0 - sum(worker.pages_free for worker in pool) / total
        for pool in _of_role(samples, role)
        if (total := sum(worker.pages_total for worker in pool))
    ]
    return PoolFigures(
        workers=most,
        busy_share=busy_s / seconds if seconds else None,
        queues=_queues(samples, role),
        kv_use=Spread.of(used),
        tokens_generated=_grown(words, role, "tokens_generated"),
        prompt_tokens_computed=_grown(words, role, "prompt_tokens_computed"),
    )


def _of_role(samples: Sequence[Sequence[WorkerSample]], role: str) -> Iterator[list[WorkerSample]]:
    return ([worker for worker in sample if worker.role == role] for sample in samples)


def _spans(words: Sequence[Sequence[WorkerSample]], role: str) -> Iterator[tuple[WorkerSample, WorkerSample]]:
    """The first and the last word of each process."""
    first: dict[tuple[str, str], WorkerSample] = {}
    last: dict[tuple[str, str], WorkerSample] = {}
    for pool in _of_role(words, role):
        for worker in pool:
            first.setdefault((worker.id, worker.boot_id), worker)
            last[(worker.id, worker.boot_id)] = worker
    return ((first[key], last[key]) for key in first)


def _growth(first: WorkerSample, last: WorkerSample, name: str) -> float:
    return last.counters.get(name, 0.0) - first.counters.get(name, 0.0)


def _grown(words: Sequence[Sequence[WorkerSample]], role: str, name: str) -> float:
    return sum(_growth(first, last, name) for first, last in _spans(words, role))


def _queues(samples: Sequence[Sequence[WorkerSample]], role: str) -> dict[str, Spread]:
    """Of all workers of the role together; queues that were always empty are left out."""
    lengths: dict[str, list[float]] = defaultdict(list)
    names = {name for pool in _of_role(samples, role) for worker in pool for name in worker.queues}
    for pool in _of_role(samples, role):
        for name in names:
            lengths[name].append(sum(worker.queues.get(name, 0.0) for worker in pool))
    return {name: Spread(fmean(found), max(found)) for name, found in sorted(lengths.items()) if any(found)}


def _moved(words: Sequence[Sequence[WorkerSample]]) -> dict[str, float]:
    moved: dict[str, float] = defaultdict(float)
    for first, last in _spans(words, "sidecar"):
        for name in last.counters:
            if name.startswith(_SENT) and name.endswith(_BYTES):
                moved[name.removeprefix(_SENT).removesuffix(_BYTES)] += _growth(first, last, name)
    return {backend: count for backend, count in sorted(moved.items()) if count}


def _cpu_share(seen: Sequence[tuple[float, float]]) -> float | None:
    if len(seen) < 2 or seen[-1][0] <= seen[0][0]:
        return None
    return (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])
