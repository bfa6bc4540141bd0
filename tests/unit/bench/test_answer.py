"""What servers send, cut anywhere and of any kind, becomes events or errors and never an exception."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.bench.wire.answer import Event, error_code, error_message, read_event
from services.bench.wire.sse import DONE, EventParser

STREAM = b': hello\r\nevent: x\r\ndata: {"a": "\xc3\xa9"}\r\n\r\ndata:one\ndata: two\n\nid: 4\n\n\ndata: [DONE]\n\n'
PAYLOADS = ['{"a": "é"}', "one\ntwo", DONE]


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_payloads_do_not_depend_on_how_bytes_are_cut(cuts: list[int]) -> None:
    parser, found, begin = EventParser(), [], 0
    for end in [*sorted(cuts), len(STREAM)]:
        found += parser.feed(STREAM[begin:end])
        begin = end
    assert found == PAYLOADS


def test_an_event_without_its_blank_line_has_not_come_yet() -> None:
    parser = EventParser()
    assert parser.feed(b"data: 1\n") == []
    assert parser.feed(b"\n") == ["1"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"choices": [{"text": "a"}]}, Event(has_text=True)),
        ({"choices": [{"delta": {"content": "a"}}]}, Event(has_text=True)),
        ({"choices": [{"delta": {"reasoning_content": "a"}}]}, Event(has_text=True)),
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, Event()),
        ({"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": None}, Event(finished=True)),
        (
            {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}},
            Event(prompt_tokens=3, completion_tokens=4),
        ),
        ({"baton": {"path": "remote", "timings": {"queue_s": 1}}}, Event(path="remote", timings={"queue_s": 1})),
        ({"error": {"message": "m", "code": "worker_lost"}}, Event(error="stream: worker_lost")),
        ([1], Event(error="stream: not an object")),
    ],
)
def test_events(body: Any, expected: Event) -> None:
    assert read_event(json.dumps(body)) == expected


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "usage", "delta", "text", "baton", "error", "code", "prompt_tokens"]), inner
        )
    ),
)


@given(anything)
def test_no_json_breaks_the_reader(body: Any) -> None:
    read_event(json.dumps(body))
    error_code(json.dumps(body))
    error_message(json.dumps(body))


def test_what_is_not_json() -> None:
    assert read_event("{").error == "stream: not JSON"
    assert error_code("<html>\nBad   Gateway</html>") == "<html> Bad Gateway</html>"


def test_the_name_of_an_error() -> None:
    assert error_code('{"error": {"message": "long", "type": "t", "code": null}}') == "t"
    assert error_code('{"error": {"message": "long", "type": "t", "code": "c"}}') == "c"
    assert error_code('{"error": "plain"}') == '{"error": "plain"}'
    assert error_message('{"error": {"message": "long"}}') == "long"
