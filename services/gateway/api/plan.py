"""From a checked body to what shall be generated: prompts as token ids, sampling, and how the answer is to look."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from services.gateway.api.body import shown
from services.gateway.api.context import RequestContext
from services.gateway.api.errors import ApiError, invalid
from services.gateway.api.limits import HttpLimits
from services.gateway.api.prompts import Prompt
from services.gateway.api.schemas import BatonOptions, ChatBody, CompletionBody, GenerationBody
from services.gateway.generation import GenerationRequest, PathPolicy
from shared.protocol.messages import SamplingSpec
from shared.runtime.errors import ModelNotFound
from shared.runtime.ids import new_seed

SMALLEST_TOP_P = 1e-6
"""top_p 0 means the best token alone; the engine's top_p must be positive."""
MAX_BIASES = 1024
"""More would not fit a control message together with a long prompt."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One HTTP request. Choice c of prompt p has the index `p * n + c` in the answer."""

    chat: bool
    model: str
    request_id: str
    requests: tuple[GenerationRequest, ...]
    echoes: tuple[str, ...]
    """What each prompt's choices begin with: its text under `echo`, else nothing."""
    n: int
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    timings: bool
    token_ids: bool
    tell_baton: bool
    """The client said `baton`, so it is told about the way."""
    resumable: bool = False
    """The stream can be picked up again after its connection was lost."""

    @property
    def logprobs(self) -> int | None:
        return self.requests[0].sampling.logprobs

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)


@dataclass(frozen=True, slots=True)
class Served:
    """What this gateway serves, as far as a plan needs it."""

    models: tuple[str, ...]
    vocab_size: int
    max_model_len: int
    limits: HttpLimits


def make_plan(
    body: ChatBody | CompletionBody, prompts: tuple[Prompt, ...], served: Served, context: RequestContext
) -> Plan:
    """Checks everything that needs more than one field, and the prompts against the context."""
    limits, n, baton = served.limits, body.n or 1, body.baton or BatonOptions()
    if n > limits.max_choices:
        raise invalid(f"At most {limits.max_choices} choices are served.", "n")
    if body.stream_options is not None and not body.stream:
        raise invalid("'stream_options' is only allowed with 'stream'.", "stream_options")
    if baton.resumable and not body.stream:
        raise invalid("'baton.resumable' is only allowed with 'stream'.", "baton.resumable")
    wanted, field = _max_tokens(body)
    sampling = _sampling(body, served)
    requests = []
    for position, prompt in enumerate(prompts):
        budget = _budget(len(prompt.ids), wanted, field, body, served)
        if sampling.min_tokens > budget:
            raise invalid("'min_tokens' is larger than 'max_tokens'.", "min_tokens")
        requests.append(
            GenerationRequest(
                request_id=context.request_id if len(prompts) == 1 else f"{context.request_id}-{position}",
                prompt=prompt.ids,
                sampling=sampling.model_copy(update={"max_tokens": budget, "seed": _seed(body)}),
                path=_path(baton.path, limits),
                strict=baton.strict,
                kv_precision=baton.kv_precision or limits.default_kv_precision,
                timeout_s=limits.request_timeout_s,
                priority=body.priority or 0,
                tenant=context.tenant,
                cache_salt=baton.cache_salt or "",
                orphan_grace_s=limits.orphan_grace_s if baton.resumable else 0.0,
            )
        )
    return Plan(
        chat=isinstance(body, ChatBody),
        model=body.model,
        request_id=context.request_id,
        requests=tuple(requests),
        echoes=tuple(prompt.echo for prompt in prompts),
        n=n,
        stops=_stops(body.stop, limits),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        timings=baton.timings,
        token_ids=baton.token_ids,
        tell_baton=body.baton is not None,
        resumable=baton.resumable,
    )


def _path(wanted: PathPolicy | None, limits: HttpLimits) -> PathPolicy:
    """Without prefill workers every prompt is computed by the worker that decodes, and that is no detour."""
    if limits.mode == "separated":
        return wanted or limits.default_path
    if wanted in ("remote", "hybrid"):
        raise invalid(
            f"This server runs in mode '{limits.mode}' and has no prefill workers: the path cannot be '{wanted}'.",
            "baton.path",
            "unsupported_value",
        )
    return "local"


def check_model(body: GenerationBody, served: Served) -> None:
    if body.model not in served.models:
        served_here = " and ".join(f"'{name}'" for name in served.models)
        raise ModelNotFound(
            f"The model '{shown(body.model)}' does not exist; this server has {served_here}.", param="model"
        )


def _max_tokens(body: ChatBody | CompletionBody) -> tuple[int | None, str]:
    if isinstance(body, CompletionBody) or body.max_completion_tokens is None:
        return body.max_tokens, "max_tokens"
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise invalid("'max_tokens' and 'max_completion_tokens' differ; give one of them.", "max_tokens")
    return body.max_completion_tokens, "max_completion_tokens"


def _budget(prompt_len: int, wanted: int | None, field: str, body: ChatBody | CompletionBody, served: Served) -> int:
    """How many tokens may be generated. Only a budget that the client did not ask for is cut to what is left."""
    left = served.max_model_len - prompt_len
    prompt_field = "messages" if isinstance(body, ChatBody) else "prompt"
    limit = f"This model's context holds {served.max_model_len} tokens"
    if left < 1:
        raise too_long(f"{limit}; the prompt has {prompt_len} and leaves no room for an answer.", prompt_field)
    if wanted is None:
        return min(left, served.limits.default_max_tokens or left)
    if wanted > left:
        raise too_long(f"{limit}; the prompt has {prompt_len} and '{field}' asks for {wanted} more.", field)
    return wanted


def too_long(message: str, param: str) -> ApiError:
    return invalid(message, param, "context_length_exceeded")


def _seed(body: ChatBody | CompletionBody) -> int:
    """The client's seed, or one of its own for each prompt: equal prompts are not to give equal answers."""
    return new_seed() if body.seed is None else body.seed % (1 << 64)


def _sampling(body: ChatBody | CompletionBody, served: Served) -> SamplingSpec:
    return SamplingSpec(
        n=body.n or 1,
        min_tokens=body.min_tokens or 0,
        temperature=_or(body.temperature, 1.0),
        top_k=max(0, body.top_k or 0),
        top_p=max(SMALLEST_TOP_P, _or(body.top_p, 1.0)),
        min_p=_or(body.min_p, 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        logit_bias=tuple(_biases((body.logit_bias or {}).items(), served.vocab_size)),
        stop_token_ids=_stop_ids(body.stop_token_ids or [], served.vocab_size),
        ignore_eos=bool(body.ignore_eos),
        logprobs=_logprobs(body),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _logprobs(body: ChatBody | CompletionBody) -> int | None:
    if isinstance(body, CompletionBody):
        if body.logprobs is not None and body.echo:
            raise invalid(
                "'echo' with 'logprobs' is not supported: prompts have no logprobs.",
                "echo",
                "unsupported_value",
            )
        if body.best_of not in (None, body.n or 1):
            raise invalid("'best_of' must equal 'n'.", "best_of", "unsupported_value")
        return body.logprobs
    if not body.logprobs:
        if body.top_logprobs:
            raise invalid("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
        return None
    return body.top_logprobs or 0


def _biases(items: Iterable[tuple[str, float]], vocab_size: int) -> Iterable[tuple[int, float]]:
    seen: set[int] = set()
    for key, bias in items:
        if len(seen) == MAX_BIASES:
            raise invalid(f"At most {MAX_BIASES} tokens may be named.", "logit_bias")
        plain = key.isascii() and key.isdecimal() and len(key) <= 10
        if not plain or int(key) >= vocab_size:
            raise invalid(f"'{shown(key)}' is not a token id of this model.", f"logit_bias.{shown(key)}")
        if int(key) in seen:
            raise invalid(f"Token {int(key)} is named twice.", "logit_bias")
        seen.add(int(key))
        yield int(key), bias


def _stop_ids(ids: list[int], vocab_size: int) -> tuple[int, ...]:
    for position, token in enumerate(ids):
        if token >= vocab_size:
            raise invalid(f"{token} is not a token id of this model.", f"stop_token_ids[{position}]")
    return tuple(ids)


def _stops(stop: Any, limits: HttpLimits) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list):
        raise invalid("'stop' must be a string or a list of strings.", "stop", "invalid_type")
    if len(stops) > limits.max_stops:
        raise invalid(f"'stop' may hold at most {limits.max_stops} strings.", "stop")
    for position, text in enumerate(stops):
        where = "stop" if isinstance(stop, str) else f"stop[{position}]"
        if not isinstance(text, str):
            raise invalid("A stop must be a string.", where, "invalid_type")
        if not text or len(text) > limits.max_stop_chars:
            raise invalid(f"A stop must have 1 to {limits.max_stop_chars} characters.", where)
    return tuple(stops)
