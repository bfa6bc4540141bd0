"""What a gateway's requests may cost before they are given up."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GatewayFlowSettings:
    """max_attempts: tickets one request may use up by failures in a row, with no token in between. max_recoveries: how
    often it may lose its workers after the first token. grant_s: how long a worker may take to say yes or no.
    silence_s: after so much quiet the legs are asked. migrate_on_drain: streams leave a decode worker that is about
    to end. block_tokens: the unit of reuse, as the workers have it. near_tokens: under path `auto` a decode worker that
    lacks no more of a prompt computes that itself."""

    max_attempts: int = 3
    max_recoveries: int = 8
    grant_s: float = 5.0
    silence_s: float = 1.0
    migrate_on_drain: bool = True
    block_tokens: int = 64
    near_tokens: int = 64
