"""Which workers serve a request: pure functions over a snapshot of reports, so that they can be replayed.

Default policy: P by least work ahead of the prompt, D by most free pages, and where D computes the prompt itself by
fewest prompts ahead of it; what a worker holds of the prompt counts as work that is done. Nobody is chosen without
announced room, and nobody whose circuit breaker is open while another can be chosen or waited for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.gateway.breaker import Key, usable
from services.gateway.generation import PathPolicy
from services.gateway.workers import Worker
from shared.runtime.errors import NoWorker

_LEAST_SHARE = 4
"""A beginning counts from a quarter of the prompt on."""
_MOST_LOAD = 1.25


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request needs: its prompt, the choices that are to go on, and the path it may take. caught_up: of each of
    them, positions behind the prompt that D has to compute; none of a new request. avoid: peers that failed this
    request before; they are asked again only where there is no other. identity: of the model that began the answer,
    which no other may end; None: it has not begun. load: its state comes out of the stores. held: peer -> so many of
    its leading positions may have their state there. near: under `auto` a D that lacks no more than so many computes
    them itself. stored: so many leading positions may be in the stores. fetch: a D that lacks so many of these, which
    is at least one block, gets them from there while a P computes the rest; 0: none does."""

    prompt_len: int
    num_choices: int
    path: PathPolicy
    strict: bool
    max_tokens: int = 1
    caught_up: tuple[int, ...] = ()
    avoid: frozenset[str] = frozenset()
    identity: str | None = None
    load: bool = False
    held: Mapping[str, int] = field(default_factory=dict)
    near: int = 0
    stored: int = 0
    fetch: int = 0

    def share_of(self, worker: "Worker") -> float:
        """Which part of the prompt that worker would compute, 0 to 1."""
        return 1.0 - min(1.0, self.held.get(worker.peer, 0) / self.prompt_len)

    def fetches(self, worker: "Worker") -> bool:
        lacks = min(self.stored, self.prompt_len - 1) - self.held.get(worker.peer, 0)
        return bool(self.fetch) and lacks >= self.fetch

    def is_near(self, worker: "Worker") -> bool:
        held = self.held.get(worker.peer, 0)
        return bool(held) and self.prompt_len - held <= self.near


@dataclass(frozen=True, slots=True)
class Route:
    """The chosen pair; prefill is None where D computes the prompt itself. load: D takes from the stores
    what they have. held_least: D must have so much of the prompt, else another way is shorter."""

    decode: Worker
    prefill: Worker | None
    load: bool = False
    held_least: int = 0

    @property
    def workers(self) -> tuple[Worker, ...]:
        return (self.decode,) if self.prefill is None else (self.decode, self.prefill)

    @property
    def path(self) -> str:
        if self.load:
            return "store" if self.prefill is None else "hybrid"
        return "local" if self.prefill is None else "remote"

    @property
    def legs(self) -> dict[str, Key]:
        """role -> (peer, leg), as circuit breakers count them."""
        if self.prefill is None:
            return {"decode": (self.decode.peer, "local")}
        return {"decode": (self.decode.peer, "decode"), "prefill": (self.prefill.peer, "prefill")}


@dataclass(frozen=True, slots=True)
class Fleet:
    """The workers at one moment. refused: peers that said no since their last report, or whose room is kept for an
    earlier request. shut: legs that should be left alone, and how bad they are."""

    prefills: Sequence[Worker]
    decodes: Sequence[Worker]
    refused: frozenset[str] = frozenset()
    shut: Mapping[Key, tuple[int, float]] = field(default_factory=dict)


class Policy(Protocol):
    def choose(self, demand: Demand, fleet: Fleet) -> Route | None:
        """A route, None where room has to be waited for, or NoWorker where waiting cannot help."""

    def aim(self, demand: Demand, fleet: Fleet) -> Route | None:
        """Where the request will most likely go once there is room: whose room is worth keeping for it."""


class DefaultPolicy:
    """See the module's docstring."""

    def choose(self, demand: Demand, fleet: Fleet) -> Route | None:
        decodes, prefills = _candidates(demand, fleet)
        if prefills is None:
            local = choose_local(demand, _willing(decodes, "local", fleet), decodes)
            return None if local is None else Route(local, None, demand.load)
        if (near := choose_near(demand, _willing(decodes, "local", fleet))) is not None:
            return Route(near, None, held_least=max(0, demand.prompt_len - demand.near))
        decode = choose_decode(demand, _willing(decodes, "decode", fleet), decodes)
        if decode is None:
            return None
        matching = _matching(decode, prefills)
        prefill = choose_prefill(demand, _willing(matching, "prefill", fleet), matching)
        return None if prefill is None else Route(decode, prefill, demand.fetches(decode))

    def aim(self, demand: Demand, fleet: Fleet) -> Route | None:
        decodes, prefills = _candidates(demand, fleet)
        leg = "local" if prefills is None else "decode"
        decode = _roomiest(demand, usable(decodes, leg, fleet.shut, _peer))
        if decode is None:
            return None
        if prefills is None:
            return Route(decode, None, demand.load)
        prefill = _roomiest(demand, usable(_matching(decode, prefills), "prefill", fleet.shut, _peer))
        return None if prefill is None else Route(decode, prefill)


def _candidates(demand: Demand, fleet: Fleet) -> tuple[Sequence[Worker], Sequence[Worker] | None]:
    """Ds, and Ps if the path is remote, whether or not they can be asked now; NoWorker where there is none."""
    decodes, prefills = _of_its_model(demand, fleet.decodes), _of_its_model(demand, fleet.prefills)
    if not decodes:
        what = "no decode worker is alive" if not fleet.decodes else "no decode worker holds the model of this answer"
        raise NoWorker(what, retry_after_s=1.0)
    if demand.load or (prefills and not demand.strict and _outgrows(demand, prefills)):
        is_remote = False
    elif demand.path == "auto" and not demand.strict:
        is_remote = bool(prefills)
    else:
        is_remote = demand.path != "local"
    if is_remote and not prefills:
        raise NoWorker("no prefill worker is alive and this request must not take another path", retry_after_s=1.0)
    return (_served(decodes, prefills), prefills) if is_remote else (decodes, None)


def _of_its_model(demand: Demand, workers: Sequence[Worker]) -> Sequence[Worker]:
    """What has begun with one model, its weights and its kind of state, goes on with the same."""
    return [w for w in workers if demand.identity in (None, w.report.identity)]


def _outgrows(demand: Demand, prefills: Sequence[Worker]) -> bool:
    """An answer that has grown, with its prompt, beyond every P: a D may have room for both all the same."""
    return demand.identity is not None and not any(could_fit(w, demand) for w in prefills)


def _willing(workers: Sequence[Worker], leg: str, fleet: Fleet) -> Sequence[Worker]:
    """Those that can be asked now."""
    return [w for w in usable(workers, leg, fleet.shut, _peer) if w.peer not in fleet.refused]


def _served(decodes: Sequence[Worker], prefills: Sequence[Worker]) -> Sequence[Worker]:
    """The Ds that some P can hand over to; all where there is none, so that it is said what does not fit."""
    identities = {w.report.identity for w in prefills}
    return [w for w in decodes if w.report.identity in identities] or decodes


def _matching(decode: Worker, prefills: Sequence[Worker]) -> Sequence[Worker]:
    """The Ps that can hand over to this D."""
    matching = [w for w in prefills if w.report.identity == decode.report.identity]
    if not matching:
        theirs = ", ".join(sorted({w.report.identity or "nothing" for w in prefills}))
        raise NoWorker(
            f"no prefill worker holds the model, weights and KV type of the decode worker: prefill holds {theirs}, "
            f"decode holds {decode.report.identity}",
            retry_after_s=1.0,
        )
    return matching


def _roomiest(demand: Demand, workers: Sequence[Worker]) -> Worker | None:
    fit = [w for w in workers if could_fit(w, demand)]
    return max(fit, key=lambda w: (w.free_pages, w.peer), default=None)


def _peer(worker: Worker) -> str:
    return worker.peer


def choose_prefill(demand: Demand, willing: Sequence[Worker], known: Sequence[Worker] = ()) -> Worker | None:
    """The P whose queue is shortest among those with credit for the whole prompt, with what it would compute of it: so
    that a beginning that it has outweighs one prompt ahead at most, however many ask for it. known: all there are,
    where some of them cannot be asked now."""
    able = _able(demand, willing, known)
    return min(able, key=lambda w: (_work_ahead(w) + demand.share_of(w), -w.free_pages, w.peer), default=None)


def choose_decode(demand: Demand, willing: Sequence[Worker], known: Sequence[Worker] = ()) -> Worker | None:
    """The D with most of the prompt, then with most free pages, among those with room for it and its choices' first
    steps. What it holds counts for nothing where it is little, or where the D is busier than others (`_is_free`)."""
    able = _able(demand, willing, known)

    def rank(worker: Worker) -> tuple[int, int, str]:
        held = demand.held.get(worker.peer, 0)
        counts = _LEAST_SHARE * held >= demand.prompt_len and _is_free(worker, able)
        return held if counts else 0, worker.free_pages, worker.peer

    return max(able, key=rank, default=None)


def choose_near(demand: Demand, willing: Sequence[Worker]) -> Worker | None:
    """A D that has nearly all of the prompt, room now, and no more to do than others; the one with most of it."""
    if demand.path != "auto" or demand.strict:
        return None
    near = [w for w in willing if demand.is_near(w) and has_room(w, demand) and w.peer not in demand.avoid]
    near = [w for w in near if _is_free(w, willing)]
    return max(near, key=lambda w: (demand.held[w.peer], w.free_pages, w.peer), default=None)


def choose_local(demand: Demand, willing: Sequence[Worker], known: Sequence[Worker] = ()) -> Worker | None:
    """The D with fewest prompts to compute, its share of this one counted, then the one with most free pages, among
    those with room."""
    able = _able(demand, willing, known)
    return min(able, key=lambda w: (_prompts_ahead(w) + demand.share_of(w), -w.free_pages, w.peer), default=None)


def pages_wanted(worker: Worker, demand: Demand) -> int:
    """What the worker will take for this request: its own arithmetic, from the settings it reports."""
    prompt = worker.pages_for(demand.prompt_len)
    if worker.report.role == "prefill":
        return prompt
    growth = worker.report.settings.get("growth_tokens")
    steps = min(demand.max_tokens, growth) if isinstance(growth, int) else 1
    behind = demand.caught_up or (0,) * demand.num_choices
    return prompt + sum(worker.pages_for(num_tokens + steps) for num_tokens in behind)


def _able(demand: Demand, willing: Sequence[Worker], known: Sequence[Worker]) -> list[Worker]:
    """Those with room now. Where the request could never fit any worker they are asked all the same, because only a
    worker itself can say so, and waiting would hold up everybody behind. A worker with preempted requests takes no new
    ones."""
    never = not any(could_fit(w, demand) for w in known or willing)
    able = [w for w in willing if never or has_room(w, demand)]
    return [w for w in able if w.peer not in demand.avoid] or able


def could_fit(worker: Worker, demand: Demand) -> bool:
    """If it were empty."""
    return worker.total_pages >= pages_wanted(worker, demand) and worker.total_slots >= _slots_wanted(worker, demand)


def has_room(worker: Worker, demand: Demand) -> bool:
    """As announced."""
    has_slots = worker.free_slots >= _slots_wanted(worker, demand)
    is_calm = not worker.report.queues.get("preempted")
    return has_slots and is_calm and worker.free_pages >= pages_wanted(worker, demand)


def _slots_wanted(worker: Worker, demand: Demand) -> int:
    return 1 if worker.report.role == "prefill" else demand.num_choices


def _is_free(worker: Worker, others: Sequence[Worker]) -> bool:
    """Whether a D may be chosen for what it holds: at least half as many free pages as the roomiest, and no more under
    way than a quarter above the mean, and one. So a beginning that all have in common goes round."""
    if 2 * worker.free_pages < max(other.free_pages for other in others):
        return False
    mean = sum(map(_under_way, others)) / len(others)
    return _under_way(worker) <= _MOST_LOAD * mean + 1


def _under_way(worker: Worker) -> int:
    return worker.report.queues.get("running", 0) + _prompts_ahead(worker)


def _prompts_ahead(worker: Worker) -> int:
    """What a D has not computed yet, and what it was asked for since its report."""
    queues = worker.report.queues
    return queues.get("waiting", 0) + queues.get("prefilling", 0) + len(worker.pending)


def _work_ahead(worker: Worker) -> int:
    """Prompts before a new one: those the report counts and those asked for since."""
    return sum(worker.report.tickets.values()) + len(worker.pending)
