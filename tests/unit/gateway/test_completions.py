"""Text completions: prompts in every form, echo, logprobs, several prompts."""

import dataclasses
import json
from typing import Any

import pytest

from services.gateway.generation import GenerationRequest
from shared.protocol.messages import FinishReason


async def test_whole_answer(gateway: Any) -> None:
    answer = await gateway.client.completions.create(model="toy", prompt="Say", max_tokens=20)
    assert answer.object == "text_completion"
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Hello, world", "stop")
    assert gateway.text.decode(gateway.generation.request.prompt) == "Say"
    assert answer.usage.prompt_tokens == 3


async def test_stream(gateway: Any) -> None:
    stream = await gateway.client.completions.create(model="toy", prompt="Say", stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello, world"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]


@pytest.mark.parametrize("prompt", ["Say", ["Say"]])
async def test_prompt_as_text_or_as_a_list_of_one(gateway: Any, prompt: Any) -> None:
    await gateway.client.completions.create(model="toy", prompt=prompt)
    assert gateway.generation.request.prompt == tuple(gateway.text.encode("Say", add_special=True))


@pytest.mark.parametrize("prompt", [[5, 6, 257], [[5, 6, 257]]])
async def test_prompt_as_token_ids(gateway: Any, prompt: Any) -> None:
    await gateway.client.completions.create(model="toy", prompt=prompt)
    assert gateway.generation.request.prompt == (5, 6, 257)


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts(gateway: Any, stream: bool) -> None:
    def script(request: GenerationRequest) -> list[Any]:
        text = gateway.text.decode(request.prompt).upper()
        spoken = [gateway.say(text + str(choice), choice) for choice in range(2)]
        return [tuple(pair) for pair in zip(*spoken, strict=True)]

    gateway.generator.script = script
    arguments = {"model": "toy", "prompt": ["one", "three"], "n": 2}
    if stream:
        texts = {index: "" for index in range(4)}
        async for chunk in await gateway.client.completions.create(**arguments, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    else:
        answer = await gateway.client.completions.create(**arguments)
        texts = {choice.index: choice.text for choice in answer.choices}
        assert answer.usage.prompt_tokens == 8
        assert answer.usage.completion_tokens == 2 * 5 + 2 * 7
    assert texts == {0: "ONE0", 1: "ONE1", 2: "THREE0", 3: "THREE1"}
    ids = [generation.request.request_id for generation in gateway.generator.generations]
    assert len(set(ids)) == 2
    assert all(generation.closed.is_set() for generation in gateway.generator.generations)


@pytest.mark.parametrize("prompt", ["Say ", [[5, 6]]])
@pytest.mark.parametrize("stream", [False, True])
async def test_echo(gateway: Any, prompt: Any, stream: bool) -> None:
    shown = prompt if isinstance(prompt, str) else gateway.text.decode([5, 6])
    arguments = {"model": "toy", "prompt": prompt, "echo": True, "n": 2}
    if stream:
        texts = ["", ""]
        async for chunk in await gateway.client.completions.create(**arguments, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    else:
        texts = [choice.text for choice in (await gateway.client.completions.create(**arguments)).choices]
    assert texts == [shown + "Hello, world"] * 2


async def test_a_stop_string_does_not_match_the_echo(gateway: Any) -> None:
    answer = await gateway.client.completions.create(model="toy", prompt="He", echo=True, stop=["HeH", "ello"])
    assert answer.choices[0].text == "HeH"


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(gateway: Any, stream: bool) -> None:
    gateway.reply("aé!", finish=FinishReason.LENGTH)
    arguments = {"model": "toy", "prompt": "Say", "logprobs": 2}
    if stream:
        _, events = await gateway.sse("/v1/completions", **arguments)
        parts = [json.loads(event)["choices"][0]["logprobs"] for event in events[:-1]]
        logprobs = {key: [value for part in parts for value in part[key]] for key in parts[0]}
    else:
        _, body, _ = await gateway.post("/v1/completions", **arguments)
        logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "!"]
    assert logprobs["token_logprobs"] == [-0.5] * 4
    assert logprobs["text_offset"] == [0, 1, 1, 2]
    assert logprobs["top_logprobs"][0] == {"a": -0.5, "b": -9999.0}


async def test_logprobs_stop_with_the_text(gateway: Any) -> None:
    _, body, _ = await gateway.post("/v1/completions", model="toy", prompt="Say", logprobs=0, stop="ll")
    [choice] = body["choices"]
    assert choice["text"] == "He"
    assert choice["logprobs"]["tokens"] == ["H", "e", "l", "l"]
    assert body["usage"]["completion_tokens"] == 4


async def test_harmless_fields_are_accepted(gateway: Any) -> None:
    status, _, _ = await gateway.post(
        "/v1/completions",
        model="org/toy",
        prompt="Say",
        n=2,
        best_of=2,
        suffix=None,
        top_p=0,
        temperature=0,
        top_k=-1,
        stop=[],
        logit_bias={},
        stream_options=None,
        user="u",
        metadata=None,
    )
    assert status == 200
    assert gateway.generation.request.sampling.top_p > 0
    assert gateway.generation.request.sampling.top_k == 0


async def test_long_prompts_are_tokenized_the_same(start: Any) -> None:
    gateway = await start(inline_encode_chars=1)
    await gateway.client.completions.create(model="toy", prompt="Say it")
    assert gateway.text.decode(gateway.generation.request.prompt) == "Say it"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_token_is_counted_and_not_shown(gateway: Any, stream: bool) -> None:
    """The last token ended the choice by its id, as `stop_token_ids` asks for."""
    said = gateway.say("abc", finish=FinishReason.LENGTH)
    last = dataclasses.replace(said[-1], finish=FinishReason.STOP)
    gateway.generator.script = lambda request: [(said[0],), (said[1], last)]
    arguments = {"model": "toy", "prompt": "Say", "extra_body": {"stop_token_ids": [last.token]}}
    if stream:
        chunks = [chunk async for chunk in await gateway.client.completions.create(**arguments, stream=True)]
        assert "".join(chunk.choices[0].text for chunk in chunks) == "ab"
        assert chunks[-1].choices[0].finish_reason == "stop"
    else:
        answer = await gateway.client.completions.create(**arguments)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("ab", "stop")
        assert answer.usage.completion_tokens == 3


async def test_equal_prompts_without_a_seed_do_not_give_equal_answers(gateway: Any) -> None:
    await gateway.post("/v1/completions", model="toy", prompt=["Say", "Say", "Say"], max_tokens=3)
    await gateway.post("/v1/completions", model="toy", prompt=["Say", "Say"], max_tokens=3, seed=7)
    seeds = [made.request.sampling.seed for made in gateway.generator.generations]
    assert len(set(seeds[:3])) == 3
    assert seeds[3:] == [7, 7]
