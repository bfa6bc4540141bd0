"""How many prompts and choices are in which queue of an engine."""

from collections.abc import Iterable

from shared.engine.sequence import Group, Phase


def queue_lengths(groups: Iterable[Group]) -> dict[str, int]:
    """What `Engine.queues` says of them."""
    lengths = {"waiting": 0, "prefilling": 0, "parked": 0, "yielded": 0, "running": 0, "preempted": 0}
    for group in groups:
        if group.phase is Phase.PROMPT:
            lengths["prefilling" if group.computed else "waiting"] += 1
        elif group.phase is Phase.PARKED:
            lengths["parked"] += 1
        elif group.phase is Phase.DECODING:
            lengths["running"] += len(group.live)
        elif group.phase is Phase.PREEMPTED and group.decodes:
            lengths["preempted"] += 1
        elif group.phase is Phase.PREEMPTED:
            lengths["waiting" if group.claims else "yielded"] += 1
    return lengths
