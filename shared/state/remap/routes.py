"""Who sends what to whom: the pairs of ranks between which state travels, and which heads of which component on each.

Both sides compute the same routes from what they know of each other, so nothing about them has to be agreed. Each head
goes once to each rank that keeps it, from one of the ranks that hold it. State that every rank has travels along with
what is sent anyway, so that routes stay few.
"""

from shared.state.remap.route import Route
from shared.state.remap.sharding import ShardedState, check_fit, heads_held, num_heads


def routes(source: ShardedState, target: ShardedState) -> tuple[Route, ...]:
    """All routes from `source` to `target`, by rank. Raises GeometryMismatch where the two do not hold the same state.

    Costs about ranks x heads steps of Python: compute it once for each pair of groups, not for each request.
    """
    check_fit(source, target)
    sizes = [num_heads(component) for component in source.components]
    taken: dict[tuple[int, int], list[list[int]]] = {}
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        for head in range(sizes[index]):
            holders = _holders(head, sizes[index], source.tp_size)
            keepers = _holders(head, sizes[index], target.tp_size)
            for k, keeper in enumerate(keepers):
                used = [holder for holder in holders if (holder, keeper) in taken]
                holder = used[0] if used else holders[k * len(holders) // len(keepers)]
                taken.setdefault((holder, keeper), [[] for _ in sizes])[index].append(head)
    return tuple(
        Route(source, target, *ranks, heads=tuple(_range(heads) for heads in by_component))
        for ranks, by_component in sorted(taken.items())
    )


def _holders(head: int, heads: int, tp_size: int) -> list[int]:
    return [rank for rank in range(tp_size) if head in heads_held(heads, tp_size, rank)]


def _range(heads: list[int]) -> range:
    """Two ranks share neighbouring heads only: either the holder has a run of its own, or it has a single head."""
    if not heads:
        return range(0)
    assert heads == list(range(heads[0], heads[-1] + 1))
    return range(heads[0], heads[-1] + 1)
