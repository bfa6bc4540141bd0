"""How a cluster divides prompts and decoding among its workers. All modes run the same engine and the same protocol.

separated: prefill workers compute prompts and hand their state over to decode workers. colocated: there are no prefill
workers; each decode worker computes its requests' prompts itself, whole, in steps that its running requests share
(continuous batching). chunked: the same, but no step has more than `step_tokens` tokens: running requests come first,
and prompts are cut to what is left.
"""

from typing import Literal

Mode = Literal["separated", "colocated", "chunked"]


def check_budget(mode: Mode, step_tokens: int, max_running: int) -> None:
    """ValueError where a step could have more running sequences than it may have tokens, so that prompts would wait
    for ever."""
    if mode == "chunked" and step_tokens < max_running:
        raise ValueError(
            f"step_tokens ({step_tokens}) is below max_running ({max_running}): in mode chunked a step holds a token "
            "of each running sequence; raise the first or lower the second"
        )
