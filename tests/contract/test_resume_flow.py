"""A request that was cut off goes on on another D: what P and D do for a ticket that has a history, and say of it."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from shared.protocol import subjects
from shared.protocol.messages import Cancel, FinishReason, ReplayStatus, SamplingSpec, Verdict
from tests.contract.resume_stage import Heard, Stage, on_stage
from tests.sim.cluster import prompt_of
from tests.support_engine import undivided
from tests.support_resume import Cut, Seen

PENALTIES = SamplingSpec(
    seed=3, temperature=0.9, max_tokens=20, frequency_penalty=0.8, repetition_penalty=1.2, logprobs=2, ignore_eos=True
)


@pytest.mark.parametrize(
    "sizes",
    [{"overlap": "layers"}, {"optimistic_attempts": 1}, {"prefill_page_tokens": 8, "growth_tokens": 1}],
    ids=str,
)
@pytest.mark.parametrize("at", [1, 2, 6, 19])
def test_one_choice_goes_on_from_the_state_of_all_but_its_last_token(at: int, sizes: dict[str, Any]) -> None:
    async def scenario(stage: Stage) -> None:
        cut = await stage.cut(prompt_of(9), PENALTIES, at)
        d = stage.cluster.decodes[1]
        heard = await stage.go_on(d, cut)
        assert heard.given(d.peer, 1) == cut.rest
        assert heard.given(stage.p.peer, 1) == [[]], "the client has had these"
        assert d.engine.stats.prompt_tokens_computed == 0
        assert stage.p.engine.stats.prompt_tokens_computed == 9 + at - 1
        [timings] = heard.timings
        assert timings.prefill_s > 0
        assert all(num_bytes for _, num_bytes in timings.bytes)

    on_stage(scenario, **sizes)


@pytest.mark.parametrize("local", [False, True], ids=["remote", "local"])
def test_each_choice_goes_on_where_it_was(local: bool) -> None:
    """One after nine tokens, one that has none yet, one that its last token has ended, one that the client ended."""

    async def scenario(stage: Stage) -> None:
        sampling = PENALTIES.model_copy(update={"n": 4})
        cut = await stage.cut(prompt_of(13), sampling, 9, 0, 20, 4, stopped=[3])
        d = stage.cluster.decodes[1]
        heard = await stage.go_on(d, cut, local=local)
        assert heard.given(d.peer, 4) == cut.rest
        assert [len(rest) for rest in cut.rest] == [11, 20, 0, 0]
        assert heard.given(stage.p.peer, 4) == [[]] * 4
        assert len(heard.timings) == 1

    on_stage(scenario)


@pytest.mark.parametrize("at", [1, 7])
def test_without_p_d_computes_what_was_given_out_as_well(at: int) -> None:
    async def scenario(stage: Stage) -> None:
        cut = await stage.cut(prompt_of(9), PENALTIES, at)
        d = stage.cluster.decodes[1]
        heard = await stage.go_on(d, cut, local=True)
        assert heard.given(d.peer, 1) == cut.rest
        assert d.engine.stats.prompt_tokens_computed == 9 + at - 1
        [timings] = heard.timings
        assert timings.prefill_s > 0

    on_stage(scenario)


async def cut_where_ps_own_token_would_end_it(stage: Stage) -> Cut:
    """P draws without the penalties for what was given out, and its token is a stop token of the request."""
    cut = await stage.cut(prompt_of(9), PENALTIES, 0)
    tokens, one = [token for _, token, *_ in cut.whole[0]], PENALTIES.model_copy(update={"max_tokens": 1})
    for at in range(2, 20):
        cut = replace(cut, at=(at,))
        [[drawn]] = undivided(cut.past.trunk(cut.prompt), one)
        if drawn not in tokens:
            return replace(cut, sampling=PENALTIES.model_copy(update={"stop_token_ids": (drawn,)}))
    raise AssertionError("P draws nothing else than the request did")


def test_ps_own_token_ends_nothing() -> None:
    async def scenario(stage: Stage) -> None:
        cut = await cut_where_ps_own_token_would_end_it(stage)
        d = stage.cluster.decodes[1]
        heard = await stage.go_on(d, cut)
        assert heard.given(d.peer, 1) == cut.rest
        assert all(num_bytes for _, num_bytes in heard.timings[0].bytes)

    on_stage(scenario)


def test_state_that_was_never_sent_is_missed_whatever_ps_token_says() -> None:
    """P was not told that the request is resumed: to it all is over, and D has nothing to go on from."""

    async def scenario(stage: Stage) -> None:
        cut = await cut_where_ps_own_token_would_end_it(stage)
        d = stage.cluster.decodes[1]
        room = await stage.begin(d, cut, resumed=False)
        heard = stage.scribe.heard[room]
        await stage.scribe.until(lambda: bool(heard.fails))
        assert heard.fails[0].code == "corrupt_state"
        assert heard.given(d.peer, 1) == [[]]
        await stage.cluster.settle()

    on_stage(scenario)


def test_where_only_first_tokens_are_missing_ps_are_taken() -> None:
    """They end the request: D passes them on and lets everybody go."""

    async def scenario(stage: Stage) -> None:
        sampling = SamplingSpec(seed=4, n=3, max_tokens=1, logprobs=1)
        cut = await stage.cut(prompt_of(9), sampling, 1, 0, 0)
        d = stage.cluster.decodes[1]
        heard = await stage.go_on(d, cut)
        assert heard.given(d.peer, 3) == cut.rest
        assert {rest[0][3] for rest in cut.rest if rest} == {FinishReason.LENGTH}
        assert heard.given(stage.p.peer, 3) == [[]] * 3
        assert d.engine.stats.tokens_generated == 0

    on_stage(scenario)


def test_a_replay_begins_where_the_ticket_does() -> None:
    async def scenario(stage: Stage) -> None:
        cut = await stage.cut(prompt_of(9), PENALTIES.model_copy(update={"n": 2}), 7, 20)
        d = stage.cluster.decodes[1]
        room = await stage.begin(d, cut)
        await stage.scribe.until(lambda: len(stage.scribe.heard[room].given(d.peer, 2)[0]) >= 4)

        async def ask_for(*wanted: tuple[int, int]) -> tuple[ReplayStatus, list[list[Seen]]]:
            reply = await stage.scribe.replay(d, room, *wanted)
            heard = Heard([(d.peer, entry) for entry in reply.entries])
            assert [(entry.choice, entry.index) for entry in reply.entries] == [
                (c, max(k, cut.at[c])) for c, k in wanted
            ]
            return reply.status, heard.given(d.peer, 2)

        status, (some, over) = await ask_for((0, 9), (1, 20))
        assert status is ReplayStatus.LIVE
        assert over == []
        assert some == cut.rest[0][2 : 2 + len(some)]
        assert 2 <= len(some) < len(cut.rest[0])
        assert (await ask_for((0, 0)))[1][0][:3] == cut.rest[0][:3], "what D never had is not made up"
        await stage.scribe.until(lambda: len(d.desk) == 0)
        status, (rest, over) = await ask_for((0, 7), (1, 20))
        assert (status, rest, over) == (ReplayStatus.ENDED, cut.rest[0], [])
        assert (await ask_for((0, 20)))[1][0] == []
        await stage.cluster.settle()

    on_stage(scenario)


@pytest.mark.parametrize("stash_bytes", [0, 1 << 16], ids=["recompute", "stash"])
def test_two_that_go_on_where_there_is_room_for_one_take_turns(stash_bytes: int) -> None:
    async def scenario(stage: Stage) -> None:
        cuts = [await stage.cut(prompt_of(9, at), PENALTIES, at) for at in (3, 10)]
        d = stage.cluster.decodes[1]
        async with asyncio.TaskGroup() as both:
            runs = [both.create_task(stage.go_on(d, cut)) for cut in cuts]
        assert [run.result().given(d.peer, 1) for run in runs] == [cut.rest for cut in cuts]
        assert d.engine.stats.preemptions > 0
        assert bool(d.engine.stats.preemptions_stashed) == bool(stash_bytes)

    on_stage(scenario, num_pages=9, prefill_pages=64, growth_tokens=1, stash_bytes=stash_bytes)


def test_a_choice_that_the_client_ends_now_ends_alone() -> None:
    async def scenario(stage: Stage) -> None:
        cut = await stage.cut(prompt_of(9), PENALTIES.model_copy(update={"n": 2}), 3, 6)
        d = stage.cluster.decodes[1]
        room = await stage.begin(d, cut)
        ends = Cancel(room=room, generation=1, reason="stop", choice=1)
        await stage.scribe.until(lambda: len(stage.scribe.heard[room].given(d.peer, 2)[1]) >= 2)
        assert await stage.scribe.say(d, subjects.CANCEL, ends) == Verdict(ok=True)
        await stage.scribe.until(lambda: stage.scribe.heard[room].ended == {0})
        first, second = stage.scribe.heard[room].given(d.peer, 2)
        assert first == cut.rest[0]
        assert second == cut.rest[1][: len(second)]
        assert len(second) < len(cut.rest[1])
        await stage.cluster.settle()

    on_stage(scenario)


@pytest.mark.parametrize(
    ("history", "finished", "message"),
    [
        ([(1, 2)], [], "2 choices, and 1 of them"),
        ([(1, 2)] * 100, [], "2 choices, and 100 of them"),
        ([], [1], "choice 1 is finished, and 0"),
        ([(1,), (2,)], [7], "choice 7 is finished"),
        ([(1,), (2,)], [1, 0, 1], "nothing is left"),
        ([(1,), (-5,)], [], "token ids"),
        ([(1,), (1 << 30,)], [1], "token ids"),
        ([(1,), (2,) * 21], [], "21 tokens already"),
        ([(1,), (2,) * 20], [], "finished by the tokens"),
    ],
)
def test_what_cannot_be_is_refused_and_holds_nothing(
    history: list[tuple[int, ...]], finished: list[int], message: str
) -> None:
    async def scenario(stage: Stage) -> None:
        d = stage.cluster.decodes[1]
        new = Cut(prompt_of(9), PENALTIES.model_copy(update={"n": 2}), ((), ()), (0, 0))
        reserve, _ = stage.orders(d, new, history=history, finished=finished)
        verdict = await stage.scribe.say(d, subjects.RESERVE, reserve)
        assert (verdict.ok, verdict.code) == (False, "invalid_request")
        assert message in verdict.message
        await stage.cluster.settle()

    on_stage(scenario)


def test_state_of_another_length_is_not_taken_over() -> None:
    """P was told the prompt alone, and D waits for what was given out as well."""

    async def scenario(stage: Stage) -> None:
        cut = await stage.cut(prompt_of(9), PENALTIES, 6)
        d = stage.cluster.decodes[1]
        room = await stage.begin(d, cut, computed=cut.prompt)
        heard = stage.scribe.heard[room]
        await stage.scribe.until(lambda: bool(heard.fails))
        assert (heard.fails[0].code, heard.fails[0].message) == (
            "protocol_error",
            "the record speaks of 9 tokens, and 14 are handed over",
        )
        assert heard.given(d.peer, 1) == [[]]
        await stage.cluster.settle()

    on_stage(scenario)
