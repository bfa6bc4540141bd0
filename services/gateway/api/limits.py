"""What the HTTP side allows one client and all of them together."""

from dataclasses import dataclass
from typing import Self

from services.gateway.generation import PathPolicy
from shared.protocol.wire import KvPrecision
from shared.runtime.mode import Mode
from shared.runtime.settings import GatewaySettings


@dataclass(frozen=True, slots=True)
class HttpLimits:
    body_bytes: int = 8 << 20
    max_active: int = 2048
    """Requests in hand at one time; one more is answered 429."""
    max_prompts: int = 16
    """Prompts of one completions request, each a generation of its own."""
    max_choices: int = 128
    max_stops: int = 4
    max_stop_chars: int = 1024
    default_max_tokens: int | None = None
    """For requests that name none; None: what is left of the context."""
    default_path: PathPolicy = "auto"
    default_kv_precision: KvPrecision = "lossless"
    mode: Mode = "separated"
    request_timeout_s: float = 600.0
    orphan_grace_s: float = 30.0
    read_timeout_s: float = 60.0
    """How long a client may take to send a body."""
    write_timeout_s: float = 30.0
    """How long a client may leave its connection full before its request is cancelled."""
    inline_encode_chars: int = 4096
    """Longer texts are tokenized in a thread, so that the loop goes on meanwhile."""

    @classmethod
    def from_settings(cls, settings: GatewaySettings) -> Self:
        return cls(
            body_bytes=int(settings.body_limit_bytes),
            max_active=settings.max_active,
            default_path=settings.path,
            default_kv_precision=settings.kv_precision,
            mode=settings.mode,
            request_timeout_s=settings.request_timeout_s,
            orphan_grace_s=settings.orphan_grace_s,
        )
