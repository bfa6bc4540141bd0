"""The bodies of OpenAI's API that Baton reads. Types are strict (no "5" for 5, no true for 1) and unknown fields are
refused, so that a misspelt parameter never passes in silence. What is known but not served is in `UNSUPPORTED`."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from shared.protocol.wire import KvPrecision

Finite = Annotated[float, Field(allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Role = Literal["system", "developer", "user", "assistant"]

PRIORITY_MIN, PRIORITY_MAX = -(1 << 31), (1 << 31) - 1
SEED_MIN, SEED_MAX = -(1 << 63), (1 << 64) - 1
MAX_METADATA = 16


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class BatonOptions(Body):
    """`"baton"`: what only Baton knows."""

    path: Literal["auto", "remote", "local", "hybrid"] | None = None
    strict: bool = False
    timings: bool = False
    token_ids: bool = False
    kv_precision: KvPrecision | None = None
    resumable: bool = False
    cache_salt: Annotated[str, Field(pattern=r"^[!-~]{1,100}$")] | None = None


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(Body):
    """What chat and completions have in common. null always means: as if not given."""

    model: str
    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[Finite, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[Finite, Field(gt=0, le=100)] | None = None
    logit_bias: dict[str, Annotated[Finite, Field(ge=-100, le=100)]] | None = None
    stop: Any = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = Field(default=None, max_length=64)
    seed: Annotated[int, Field(ge=SEED_MIN, le=SEED_MAX)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=PRIORITY_MIN, le=PRIORITY_MAX)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = Field(default=None, max_length=MAX_METADATA)
    baton: BatonOptions | None = None


class CompletionBody(GenerationBody):
    """POST /v1/completions. `prompt` is text, token ids, or a list of either; see `prompts.py`."""

    prompt: Any
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None


class ChatMessage(Body):
    role: Role
    content: Any = None
    name: str | None = None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


HARMLESS: dict[str, tuple[object, ...]] = {
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
}
"""Values of unsupported fields that ask for nothing."""

UNSUPPORTED_CHAT = (
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "functions",
    "function_call",
    "response_format",
    "modalities",
    "audio",
    "prediction",
    "reasoning_effort",
    "verbosity",
    "web_search_options",
    "service_tier",
    "store",
)
UNSUPPORTED_COMPLETION = ("suffix", "response_format", "service_tier", "store")
UNSUPPORTED_MESSAGE = ("audio", "function_call", "tool_calls", "tool_call_id", "refusal", "annotations")
"""null in each of them, as clients send that give back a message they got."""
