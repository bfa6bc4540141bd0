"""Which tokens a step computes beside plain decoding, and each group's share of a step as a row."""

from collections.abc import Collection, Iterable, Iterator

from shared.engine.batch import Row
from shared.engine.sampler import SampleRow
from shared.engine.sequence import Choice, Group, Phase
from shared.engine.settings import EngineSettings


def chunk_rows(
    groups: Collection[Group], num_decodes: int, settings: EngineSettings, eos_token_ids: frozenset[int]
) -> list[Row]:
    """Prompts first come, first served, beside the rows of `num_decodes` choices. What is computed ahead has its turn
    only when nobody waits for anything else."""
    waited_for = _fill(_waited_for(groups, settings, eos_token_ids), num_decodes, settings)
    return waited_for or _fill(_ahead(groups, settings, eos_token_ids), num_decodes, settings)


def _fill(candidates: Iterable[Row], num_decodes: int, settings: EngineSettings) -> list[Row]:
    """Beside decoding at most one chunk, so that token intervals stay short."""
    rows: list[Row] = []
    num_tokens = num_decodes
    for row in candidates:
        if rows and (num_decodes or num_tokens + len(row.tokens) > settings.max_step_tokens):
            break
        rows.append(row)
        num_tokens += len(row.tokens)
    return rows


def _waited_for(groups: Iterable[Group], settings: EngineSettings, eos_token_ids: frozenset[int]) -> Iterator[Row]:
    chunk = settings.prefill_chunk
    for group in groups:
        if group.phase is Phase.PROMPT:
            if not group.optimistic and group.ahead < settings.prefill_lead:
                yield _prompt_row(group, chunk, eos_token_ids)
        elif group.phase is Phase.DECODING:
            for choice in group.live:
                if (pending := group.pending_len(choice)) > 1:
                    yield choice_row(group, choice, min(chunk - choice.computed % chunk, pending), eos_token_ids)


def _ahead(groups: Iterable[Group], settings: EngineSettings, eos_token_ids: frozenset[int]) -> Iterator[Row]:
    for group in groups:
        if group.phase is Phase.PROMPT and group.optimistic:
            yield _prompt_row(group, settings.prefill_chunk, eos_token_ids)


def _prompt_row(group: Group, chunk: int, eos_token_ids: frozenset[int]) -> Row:
    """The next part of the prompt, at most `chunk` tokens; the last part draws what has not been drawn before."""
    start, end = group.computed, min(group.computed + chunk, group.prompt_len)
    samples: tuple[SampleRow, ...] = ()
    if end == group.prompt_len and not group.first:
        samples = tuple(_sample_row(group, choice, eos_token_ids) for choice in group.live if not choice.outputs)
    assert group.trunk_slot is not None
    tokens, pages = group.prompt[start:end], tuple(group.trunk_pages)
    return Row(group.key, None, tokens, start, pages, group.trunk_slot, samples)


def choice_row(group: Group, choice: Choice, count: int, eos_token_ids: frozenset[int]) -> Row:
    """The next `count` known tokens of a choice; the last known one draws the next."""
    start, end, prompt_len = choice.computed, choice.computed + count, group.prompt_len
    tokens = tuple(choice.outputs[start - prompt_len : end - prompt_len])
    samples = (_sample_row(group, choice, eos_token_ids),) if end == group.known_len(choice) else ()
    assert choice.slot is not None
    return Row(group.key, choice.index, tokens, start, tuple(choice.pages), choice.slot, samples)


def _sample_row(group: Group, choice: Choice, eos_token_ids: frozenset[int]) -> SampleRow:
    return SampleRow(
        sampling=group.sampling,
        choice=choice.index,
        position=group.known_len(choice),
        prompt_ids=group.prompt,
        output_ids=tuple(choice.outputs),
        eos_token_ids=eos_token_ids,
    )
