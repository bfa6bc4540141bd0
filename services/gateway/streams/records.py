"""Between what the gateway works with (plans, tapes) and what the journal keeps of them. Pure."""

import json
from collections.abc import Iterable, Sequence

from services.gateway.api.plan import Plan
from services.gateway.generation import GenerationRequest, TokenEvent
from services.gateway.streams.tape import PromptTape, Tape
from shared.protocol.messages import FinishReason
from shared.protocol.stream_messages import (
    StreamPart,
    StreamPrompt,
    StreamRequest,
    StreamState,
    StreamTokens,
)
from shared.runtime.errors import error_from_code


def request_of(plan: Plan, key: str, created: int) -> StreamRequest:
    """What another gateway needs to answer in our place. All prompts of a plan are asked for in one way."""
    first = plan.requests[0]
    return StreamRequest(
        request_id=plan.request_id,
        key=key,
        tenant=first.tenant,
        chat=plan.chat,
        model=plan.model,
        created=created,
        prompts=tuple(
            StreamPrompt(prompt=request.prompt, sampling=request.sampling, echo=echo)
            for request, echo in zip(plan.requests, plan.echoes, strict=True)
        ),
        n=plan.n,
        stops=plan.stops,
        include_usage=plan.include_usage,
        timings=plan.timings,
        token_ids=plan.token_ids,
        tell_baton=plan.tell_baton,
        path=first.path,
        strict=first.strict,
        kv_precision=first.kv_precision,
        priority=first.priority,
        cache_salt=first.cache_salt,
    )


def plan_of(request: StreamRequest, remaining_s: float, grace_s: float) -> Plan:
    """The plan it was made of. remaining_s: what is left of its time. grace_s: as `orphan_grace_s`."""
    ids = [request.request_id]
    if len(request.prompts) > 1:
        ids = [f"{request.request_id}-{position}" for position in range(len(request.prompts))]
    return Plan(
        chat=request.chat,
        model=request.model,
        request_id=request.request_id,
        requests=tuple(
            GenerationRequest(
                request_id=request_id,
                prompt=one.prompt,
                sampling=one.sampling,
                path=request.path,
                strict=request.strict,
                timeout_s=remaining_s,
                tenant=request.tenant,
                kv_precision=request.kv_precision,
                priority=request.priority,
                cache_salt=request.cache_salt,
                orphan_grace_s=grace_s,
            )
            for request_id, one in zip(ids, request.prompts, strict=True)
        ),
        echoes=tuple(one.echo for one in request.prompts),
        n=request.n,
        stops=request.stops,
        stream=True,
        include_usage=request.include_usage,
        timings=request.timings,
        token_ids=request.token_ids,
        tell_baton=request.tell_baton,
        resumable=True,
    )


def tokens_of(events: Sequence[TokenEvent], *, stopped: bool = False) -> StreamTokens:
    """Of one choice. Every token has a log probability, or none has."""
    return StreamTokens(
        tokens=tuple(event.token for event in events),
        logprobs=tuple(event.logprob for event in events if event.logprob is not None),
        finish=events[-1].finish if events else None,
        stopped=stopped,
    )


def tape_of(state: StreamState, parts: Iterable[StreamPart], n: int) -> Tape:
    """The tape that they were written from; ValueError where they do not fit together."""
    tape = Tape.empty(len(state.progress), n)
    for run in (*(part.choices for part in parts), state.choices):
        if len(run) != n * len(state.progress):
            raise ValueError(f"{len(run)} choices of {len(state.progress)} prompts, {n} each")
        for number, tokens in enumerate(run):
            _extend(tape.prompts[number // n], number % n, tokens)
    for prompt, progress in zip(tape.prompts, state.progress, strict=True):
        prompt.path, prompt.identity = progress.path, progress.identity
        prompt.stored, prompt.ticket, prompt.cached_tokens = progress.stored, progress.ticket, progress.cached_tokens
        prompt.timings = None if progress.timings is None else json.loads(progress.timings)
    if state.failure is not None:
        tape.failure = error_from_code(state.failure.code, state.failure.message)
    return tape


def _extend(prompt: PromptTape, choice: int, new: StreamTokens) -> None:
    events = prompt.events[choice]
    for offset, token in enumerate(new.tokens):
        is_last = offset == len(new.tokens) - 1
        logprob = new.logprobs[offset] if offset < len(new.logprobs) else None
        finish: FinishReason | None = new.finish if is_last else None
        events.append(TokenEvent(choice, len(events), token, logprob, finish))
    prompt.stopped[choice] = prompt.stopped[choice] or new.stopped
