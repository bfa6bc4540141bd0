"""Whose prompt a step computes, and how much of it.

The smaller priority number comes first, always. Within a priority who has least left comes first, so that short prompts
do not wait behind long ones, but nobody is passed without bound: as soon as those with a later deadline have computed
as many tokens as somebody has left, he is *due*. Who is due comes before all who are not, and the due ones come in the
order of their deadlines. So whatever of its priority arrives, later ones compute at most as much before a prompt's turn
as it has left itself, and the rest of a step. A request that is tried again keeps its deadline, and so its place.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.engine.sequence import Choice, Group
from shared.engine.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class Work:
    """Known tokens that have no state yet, `left` of them from position `start` on: of the prompt (choice None), or of
    a choice that catches up after it gave way."""

    group: Group
    choice: Choice | None
    start: int
    left: int


Part = tuple[Work, int]
"""What a step computes of some work: so many tokens of it."""


def in_turn(works: Sequence[Work]) -> list[Work]:
    """works: in the order of their priorities and then of their deadlines."""
    return sorted(works, key=lambda work: (work.group.priority, 0 if work.group.passed >= work.left else work.left))


def share_out(works: Sequence[Work], num_decodes: int, settings: EngineSettings) -> list[Part]:
    """What a step with `num_decodes` decoding choices computes of `works`, which are in turn. Never nothing."""
    if settings.mode == "chunked":
        return _up_to_budget(works, settings.step_tokens - num_decodes)
    if settings.mode == "colocated":
        return _whole(works, num_decodes, settings.max_step_tokens)
    return _in_chunks(works, num_decodes, settings)


def _in_chunks(works: Sequence[Work], num_decodes: int, settings: EngineSettings) -> list[Part]:
    """Chunks end at multiples of prefill_chunk whatever the load, so that the same prompt gives the same bits. Beside
    decoding there is one at most, so that token intervals stay short."""
    parts: list[Part] = []
    num_tokens = num_decodes
    for work in works:
        count = min(work.left, settings.prefill_chunk - work.start % settings.prefill_chunk)
        if parts and (num_decodes or num_tokens + count > settings.max_step_tokens):
            break
        parts.append((work, count))
        num_tokens += count
    return parts


def _whole(works: Sequence[Work], num_decodes: int, max_step_tokens: int) -> list[Part]:
    """Several prompts share a step up to its limit; one that is longer has it with the running requests alone."""
    parts: list[Part] = []
    num_tokens = num_decodes
    for work in works:
        if parts and num_tokens + work.left > max_step_tokens:
            break
        parts.append((work, work.left))
        num_tokens += work.left
    return parts


def _up_to_budget(works: Sequence[Work], budget: int) -> list[Part]:
    parts: list[Part] = []
    for work in works:
        if budget <= 0:
            break
        count = min(work.left, budget)
        parts.append((work, count))
        budget -= count
    return parts


def count_passes(works: Sequence[Work], parts: Sequence[Part]) -> None:
    """Notes for each group of `works` (ordered as `in_turn` wants them) what `parts` computes of those behind it."""
    taken = {id(work): count for work, count in parts}
    later = own = 0
    group: Group | None = None
    for work in reversed(works):
        if work.group is not group:
            later, own, group = later + own, 0, work.group
            group.passed += later
        own += taken.get(id(work), 0)
