"""The seam between the HTTP surface and the request's way through the cluster (`flow.py`).

The HTTP side builds a `GenerationRequest`, iterates over a `Generation` and renders text; it never sees a ticket.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal, Protocol

from shared.protocol.messages import FinishReason, SamplingSpec, TokenLogprob
from shared.protocol.wire import KvPrecision
from shared.transfer.formats.agree import EXACT_FORMATS

PathPolicy = Literal["auto", "remote", "local", "hybrid"]
DEFAULT_TENANT = "default"
"""Whose requests are where no API keys are set."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and its n choices. sampling.seed is set by the gateway where the client gave none. tenant: by the API
    key. priority: the smaller the number, the sooner its turn. cache_salt: apart from others of its tenant.
    orphan_grace_s: how long its decode worker keeps it where this gateway is gone."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingSpec
    path: PathPolicy = "auto"
    strict: bool = False
    timeout_s: float = 600.0
    tenant: str = DEFAULT_TENANT
    kv_precision: KvPrecision = "lossless"
    priority: int = 0
    cache_salt: str = ""
    orphan_grace_s: float = 0.0

    @property
    def sharing(self) -> str:
        """Those that say the same may have state of each other: of those with one salt, who accept the same losses."""
        exact = self.kv_precision in EXACT_FORMATS
        return self.salt if exact else f"{self.salt} {self.kv_precision}"

    @property
    def salt(self) -> str:
        """Who may share state with it: those of its tenant, or of them those that say the same word."""
        return f"{self.tenant}/{self.cache_salt}" if self.cache_salt else self.tenant


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """The next token of a choice, each index exactly once and in order. finish is set on the choice's last token."""

    choice: int
    index: int
    token: int
    logprob: TokenLogprob | None = None
    finish: FinishReason | None = None


class Generation(Protocol):
    """A request on its way. Iterating yields *batches*: the events that arrived together, at least one. The iteration
    ends when every choice has finished or was stopped, and raises a BatonError where the request failed. Workers that
    are lost on the way show in a longer gap alone."""

    def __aiter__(self) -> AsyncIterator[tuple[TokenEvent, ...]]: ...

    @property
    def path(self) -> str:
        """`remote`, `local`, `hybrid`, `store`, or `pending` before the first token; where workers were lost, the last
        way."""

    @property
    def cached_tokens(self) -> int:
        """So many of the prompt's tokens needed not be computed; 0 before the first token."""

    def timings(self) -> dict[str, object]:
        """The body of `baton.timings`: seconds and bytes, complete when the iteration has ended."""

    def stop_choice(self, choice: int) -> None:
        """The text side ended this choice (a stop string); nothing more of it is delivered."""

    async def aclose(self) -> None:
        """Ends the request everywhere, whatever its state; idempotent. The client left, or all was delivered."""


class Generator(Protocol):
    """Starts generations. Raises nothing: failures come out of the iteration."""

    def generate(self, request: GenerationRequest) -> Generation: ...
