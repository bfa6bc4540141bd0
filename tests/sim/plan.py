"""What a seed stands for: the cluster's size, who asks for what and when, and which faults strike where."""

import random
from dataclasses import dataclass, replace

from shared.runtime.mode import Mode
from shared.runtime.overlap import Overlap
from tests.sim.catalogue import NUM_KINDS, Kind, kind
from tests.sim.table import TRIGGERED

PAGE_TOKENS = 4
NUM_REQUESTS = 22
_AHEAD = {"ahead", "parked", "yielded", "returning"}
_YIELDS = {"yielded", "returning"}
_TIGHT = {"preempted", "yielded", "returning"}


@dataclass(frozen=True, slots=True)
class Visit:
    """A client. leave_at_s: seconds after its arrival; leave_after: batches it takes; stop_after: tokens of choice 0
    after which the text side stops it. right: what it should get; None where it should be refused."""

    number: int
    at_s: float
    kind: Kind
    timeout_s: float
    gateway: int
    path: str = "auto"
    strict: bool = False
    leave_at_s: float | None = None
    leave_after: int | None = None
    stop_after: int | None = None
    can_fit: bool = True

    @property
    def is_hurried(self) -> bool:
        """Its deadline may pass without any fault."""
        return self.timeout_s < 10


@dataclass(frozen=True, slots=True)
class Trigger:
    """`fault` strikes when a ticket enters `state` of `role` for the nth time, `delay_s` later."""

    fault: str
    role: str
    state: str
    nth: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """prefill_pages: in D's pages, however large P's own are. reuse: workers find state of earlier prompts again, and
    prompts are such that they do. noise: chance of each message to be dropped, duplicated
    …; links: chance of each transfer to be slow, lost …"""

    seed: int
    quiet: bool
    gateways: int
    num_pages: int
    prefill_pages: int
    max_running: int
    prefill_chunk: int
    growth_tokens: int
    stash_bytes: int
    optimistic_attempts: int
    step_s: float
    visits: tuple[Visit, ...]
    noise: dict[str, float]
    links: dict[str, float]
    triggers: tuple[Trigger, ...]
    overlap: Overlap
    prefill_page_tokens: int
    reuse: bool = False
    mode: Mode = "separated"

    @property
    def can_break(self) -> bool:
        """Whether anything but single messages goes wrong: if not, every request must be answered."""
        return not self.quiet


def draw(seed: int, mode: Mode = "separated") -> Plan:
    """The plan of a seed. Every third one is of single messages that go astray; the others have it all. In the other
    modes it is the same load, and what of the faults a cluster without prefill workers can have."""
    plan = _draw(seed)
    return plan if mode == "separated" else _without_prefill(plan, mode)


def _without_prefill(plan: Plan, mode: Mode) -> Plan:
    visits = []
    for visit in plan.visits:
        kind = visit.kind
        can_fit = kind.pages(PAGE_TOKENS) <= plan.num_pages and kind.sampling.n <= plan.max_running
        path = "local" if visit.path == "remote" else visit.path
        visits.append(replace(visit, path=path, strict=False, can_fit=can_fit))
    triggers = tuple(t for t in plan.triggers if t.role != "prefill" and "prefill" not in t.fault)
    return replace(plan, mode=mode, visits=tuple(visits), triggers=triggers)


def _draw(seed: int) -> Plan:
    rng = random.Random(seed)
    quiet = seed % 3 == 0
    num_pages = rng.choice((22, 26, 32, 40))
    max_running = rng.choice((4, 6, 8))
    triggers = [] if quiet else _triggers(seed, rng)
    aimed_at = {trigger.state for trigger in triggers}
    is_tight = bool(aimed_at & _TIGHT) or rng.random() < 0.2
    if is_tight:
        num_pages = 18
    gateways = 1 if rng.random() < 0.8 else 2
    prefill_pages = 12 if is_tight else num_pages
    reuse = seed // 36 % 2 == 1
    noise = {name: rng.choice((0.0, 0.02, 0.05)) for name in ("drop", "duplicate", "delay", "reorder", "stale")}
    links = {name: rng.choice((0.0, 0.0, 0.05, 0.1)) for name in ("slow", "lost", "error", "corrupt")}
    if aimed_at & _YIELDS:  # who computed ahead gives way only where its destination is late and others are waiting
        prefill_pages = 10
        noise |= {"drop": 0.08, "delay": 0.12}
    return Plan(
        seed=seed,
        quiet=quiet,
        gateways=gateways,
        num_pages=num_pages,
        prefill_pages=prefill_pages,
        max_running=max_running,
        prefill_chunk=rng.choice((4, 8, 8, 16)),
        growth_tokens=1 if is_tight else rng.choice((2, 4, 8)),
        stash_bytes=rng.choice((0, 4096, 65536)),
        optimistic_attempts=rng.choice((1, 2)) if aimed_at & _AHEAD else rng.choice((0, 0, 2)),
        step_s=rng.choice((0.004, 0.01, 0.02)),
        visits=tuple(_visits(rng, gateways, num_pages, prefill_pages, max_running, reuse)),
        noise=noise,
        links={name: 0.0 for name in links} if quiet else links,
        triggers=tuple(triggers),
        overlap=("chunks", "layers", "auto")[seed // 3 % 3],
        prefill_page_tokens=(PAGE_TOKENS, PAGE_TOKENS // 2, PAGE_TOKENS, 2 * PAGE_TOKENS)[seed // 9 % 4],
        reuse=reuse,
    )


def _visits(
    rng: random.Random, gateways: int, num_pages: int, prefill_pages: int, max_running: int, reuse: bool
) -> list[Visit]:
    draw_kind = lambda: kind(rng.randrange(24), common=True) if reuse else kind(rng.randrange(NUM_KINDS))  # noqa: E731
    visits = []
    at_s = 0.0
    for number in range(NUM_REQUESTS):
        at_s += rng.choice((0.0, 0.0, 0.0, 0.01, 0.02, 0.3, 0.6))
        wanted = draw_kind()
        if prefill_pages < num_pages:  # where room is scarce, two long answers are needed for one to give way
            wanted = max(wanted, draw_kind(), key=lambda k: len(k.answer[0].tokens))
        path = rng.choice(("auto", "auto", "auto", "remote", "local"))
        can_fit = -(-len(wanted.prompt) // PAGE_TOKENS) <= prefill_pages
        can_fit &= wanted.pages(PAGE_TOKENS) <= num_pages and wanted.sampling.n <= max_running
        leaves = rng.random()
        visits.append(
            Visit(
                number=number,
                at_s=at_s,
                kind=wanted,
                timeout_s=rng.uniform(0.02, 2.5) if rng.random() < 0.25 else 20.0,
                gateway=rng.randrange(gateways),
                path=path,
                strict=path != "local" and rng.random() < 0.2,
                leave_at_s=rng.uniform(0.0, 0.5) if leaves < 0.06 else None,
                leave_after=rng.randrange(1, 6) if 0.06 <= leaves < 0.1 else None,
                stop_after=rng.randrange(1, 6) if 0.1 <= leaves < 0.15 else None,
                can_fit=can_fit,
            )
        )
    return visits


def _triggers(seed: int, rng: random.Random) -> list[Trigger]:
    """Round robin over all pairs of a fault and a state, so that each has its turn, and some more by chance."""
    turn = [TRIGGERED[(3 * seed + k) % len(TRIGGERED)] for k in range(3)]
    turn += [rng.choice(TRIGGERED) for _ in range(rng.randrange(2))]
    return [
        Trigger(fault, role, state, rng.choice((1, 1, 2, 4)), rng.choice((0.0, 0.0, rng.uniform(0.0, 0.03))))
        for fault, (role, state) in turn
    ]
