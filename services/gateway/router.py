"""Which workers serve a request: pure functions over a snapshot of reports, so that they can be replayed.

Default policy: P by least work ahead of the prompt, D by most free pages; nobody is chosen without announced room.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.gateway.generation import PathPolicy
from services.gateway.workers import Worker
from shared.runtime.errors import NoWorker


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request needs: its prompt, its choices, and the path it may take."""

    prompt_len: int
    num_choices: int
    path: PathPolicy
    strict: bool


@dataclass(frozen=True, slots=True)
class Route:
    """The chosen pair; prefill is None where D computes the prompt itself."""

    decode: Worker
    prefill: Worker | None

    @property
    def path(self) -> str:
        return "local" if self.prefill is None else "remote"


class Policy(Protocol):
    def choose(
        self, demand: Demand, prefills: Sequence[Worker], decodes: Sequence[Worker], refused: frozenset[str]
    ) -> Route | None:
        """A route, None where room has to be waited for, or NoWorker where waiting cannot help. `refused`: peers that
        said no since their last report."""


class DefaultPolicy:
    """See the module's docstring."""

    def choose(
        self, demand: Demand, prefills: Sequence[Worker], decodes: Sequence[Worker], refused: frozenset[str]
    ) -> Route | None:
        if not decodes:
            raise NoWorker("no decode worker is alive", retry_after_s=1.0)
        wants_remote = demand.path == "remote" or (demand.path == "auto" and (demand.strict or bool(prefills)))
        if wants_remote and not prefills:
            raise NoWorker("no prefill worker is alive and this request must not take another path", retry_after_s=1.0)
        decode = choose_decode(demand, [w for w in decodes if w.peer not in refused])
        if decode is None:
            return None
        if not wants_remote:
            return Route(decode, None)
        matching = [w for w in prefills if w.report.identity == decode.report.identity]
        if not matching:
            raise NoWorker("no prefill worker holds the model of the decode worker", retry_after_s=1.0)
        prefill = choose_prefill(demand, [w for w in matching if w.peer not in refused])
        return None if prefill is None else Route(decode, prefill)


def choose_prefill(demand: Demand, prefills: Sequence[Worker]) -> Worker | None:
    """The P whose queue is shortest among those with credit for the whole prompt; a P without any load may be asked for
    a prompt of any size, because only it can say that it never fits."""

    def has_credit(worker: Worker) -> bool:
        idle = worker.report.pages is not None and worker.free_pages == worker.report.pages.total
        return idle or worker.free_pages >= worker.pages_for(demand.prompt_len)

    able = [w for w in prefills if has_credit(w)]
    return min(able, key=lambda w: (_work_ahead(w), -w.free_pages, w.peer), default=None)


def choose_decode(demand: Demand, decodes: Sequence[Worker]) -> Worker | None:
    """The D with most free pages among those with room for the prompt and a page for each choice. Like P, an idle D may
    be asked for anything."""

    def has_room(worker: Worker) -> bool:
        idle = worker.report.pages is not None and worker.free_pages == worker.report.pages.total
        fits = worker.free_pages >= worker.pages_for(demand.prompt_len) + demand.num_choices
        return idle or (fits and worker.free_slots >= demand.num_choices)

    able = [w for w in decodes if has_room(w)]
    return max(able, key=lambda w: (w.free_pages, w.peer), default=None)


def _work_ahead(worker: Worker) -> int:
    """Prompts before a new one: those the report counts and those asked for since."""
    return sum(worker.report.tickets.values()) + len(worker.pending)
