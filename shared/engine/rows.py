"""Which tokens a step computes beside plain decoding, and each group's share of a step as a row."""

from collections.abc import Collection, Iterable

from shared.engine.batch import Row
from shared.engine.sampler import SampleRow
from shared.engine.sequence import Choice, Group, Phase
from shared.engine.settings import EngineSettings
from shared.engine.turns import Work, count_passes, in_turn, share_out


def chunk_rows(
    groups: Collection[Group], num_decodes: int, settings: EngineSettings, eos_token_ids: frozenset[int]
) -> list[Row]:
    """The parts of prompts that a step computes beside the rows of `num_decodes` choices. What is computed ahead has
    its turn only when nobody waits for anything else. groups: in the order of their start, which counts where their
    deadlines are equal."""
    works = _waited_for(groups, settings) or _ahead(groups)
    if not works:
        return []
    works.sort(key=lambda work: (work.group.priority, work.group.deadline))
    parts = share_out(in_turn(works), num_decodes, settings)
    count_passes(works, parts)
    return [
        _prompt_row(work.group, count, eos_token_ids)
        if work.choice is None
        else choice_row(work.group, work.choice, count, eos_token_ids)
        for work, count in parts
    ]


def _waited_for(groups: Iterable[Group], settings: EngineSettings) -> list[Work]:
    works = []
    for group in groups:
        if group.phase is Phase.PROMPT:
            if not group.optimistic and group.ahead < settings.prefill_lead:
                works.append(_prompt(group))
        elif group.phase is Phase.DECODING:
            behind = (choice for choice in group.choices if not choice.done and group.pending_len(choice) > 1)
            works += [Work(group, choice, choice.computed, group.pending_len(choice)) for choice in behind]
    return works


def _ahead(groups: Iterable[Group]) -> list[Work]:
    return [_prompt(group) for group in groups if group.phase is Phase.PROMPT and group.optimistic]


def _prompt(group: Group) -> Work:
    return Work(group, None, group.computed, group.trunk_len - group.computed)


def _prompt_row(group: Group, count: int, eos_token_ids: frozenset[int]) -> Row:
    """The next `count` tokens of the trunk; the last part draws what has not been drawn before."""
    start, end = group.computed, group.computed + count
    samples: tuple[SampleRow, ...] = ()
    if end == group.trunk_len and not group.first:
        samples = tuple(_sample_row(group, choice, eos_token_ids) for choice in group.live if not choice.outputs)
    assert group.trunk_slot is not None
    tokens, pages, by = group.trunk[start:end], tuple(group.trunk_pages), group.cut.layers
    return Row(group.key, None, tokens, start, pages, group.trunk_slot, samples, not group.decodes, by)


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
