"""The first light: processes of their own, a request through all of them, and an answer that says which way it took."""

import signal
from pathlib import Path

import httpx

from tests.support_client import MODEL, poll
from tests.support_cluster import RealCluster
from tests.support_golden import golden_cases

QUESTION = "What is the capital of France?"
PROMPT = [504, 3575, 282, 4649, 314]


def test_the_openai_client_streams_a_chat(cluster: RealCluster) -> None:
    golden = next(case for case in golden_cases() if case.user == QUESTION)
    with cluster.openai() as client:
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL,
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            max_tokens=64,
            stream=True,
            stream_options={"include_usage": True},
        )
        assert raw.headers["x-baton-path"] == "remote"
        assert raw.headers["content-type"].startswith("text/event-stream")
        chunks = list(raw.parse())
    parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(part.delta.content or "" for part in parts) == golden.text == "The capital of France is Paris."
    assert parts[0].delta.role == "assistant"
    assert [part.finish_reason for part in parts if part.finish_reason] == ["stop"]
    assert len(parts) > 3, "it came in parts"
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(golden.prompt), len(golden.tokens))


def test_every_part_is_a_process_of_its_own(cluster: RealCluster) -> None:
    processes = cluster.workers()
    assert [process["role"] for process in processes] == [
        "decode",
        "gateway",
        "kvstore",
        "prefill",
        "sidecar",
        "sidecar",
    ]
    assert len({process["pid"] for process in processes}) == 6
    assert len({process["boot_id"] for process in processes}) == 6
    assert {process["state"] for process in processes} == {"ready"}
    prefill, decode = cluster.workers("prefill")[0], cluster.workers("decode")[0]
    assert prefill["identity"] == decode["identity"]
    links = {worker["link"]["boot_id"] for worker in (prefill, decode)}
    assert links == {sidecar["boot_id"] for sidecar in cluster.workers("sidecar")}
    assert cluster.health() == 200


def test_counters_say_who_computed_what(cluster: RealCluster) -> None:
    def counters() -> dict[str, float]:
        cluster.settled()
        wanted = [(r, c) for r in ("prefill", "decode") for c in ("prompt_tokens_computed", "tokens_generated")]
        return {f"{role} {name}": cluster.counter(role, name) for role, name in wanted}

    before = counters()
    for _ in range(3):
        answer = cluster.complete(prompt=PROMPT, max_tokens=5, ignore_eos=True, baton={"timings": True})
        assert answer.path == "remote"
        assert answer.body["usage"] == {
            "prompt_tokens": 5,
            "completion_tokens": 5,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        timings = answer.body["baton"]["timings"]
        assert (timings["backend_asked"], timings["backend"], timings["attempts"]) == ("auto", "shm", 1)
        assert timings["bytes"] == {"kv": 30 * 5 * 2 * 3 * 64 * 4}, "layers, tokens, K and V, heads, width, float32"
    after = counters()
    assert {name: after[name] - before[name] for name in after} == {
        "prefill prompt_tokens_computed": 15,
        "prefill tokens_generated": 3,
        "decode prompt_tokens_computed": 0,
        "decode tokens_generated": 12,
    }


def test_a_hand_off_shows_in_timings_and_metrics(cluster: RealCluster) -> None:
    answer = cluster.complete(prompt=PROMPT * 60, max_tokens=2, priority=-1, baton={"timings": True, "strict": True})
    timings = answer.body["baton"]["timings"]
    assert timings["moved_s"] > 0, "300 tokens in two chunks"
    assert timings["transfer_s"] > 0
    assert 0 <= timings["overlap"] <= 1
    port = cluster.workers("prefill")[0]["http_port"]
    wanted = [
        'baton_link_sent_bytes_total{backend="shm",class="last",component="kv",format="raw"}',
        'baton_link_transfers_total{backend="shm",class="handoff"}',
        'baton_link_queue_seconds_total{backend="shm",class="last"}',
        "baton_handoff_exposed_seconds_count",
        "baton_handoff_overlap_efficiency_count",
    ]

    def shown() -> bool:
        lines = httpx.get(f"http://127.0.0.1:{port}/metrics").text.splitlines()
        return all(any(line.startswith(name) for line in lines) for name in wanted)

    poll(shown, "the prefill worker's metrics do not show what it has sent", 30.0)
    assert {one["settings"]["burst_bytes"] for one in cluster.workers("sidecar")} == {4 << 20}


def test_without_a_prefill_worker_strict_refuses_and_auto_says_local(cluster: RealCluster, tmp_path: Path) -> None:
    """In a second cluster beside the first, whose own workers stay as they are."""
    with RealCluster(tmp_path, restart=False) as other:
        assert other.url != cluster.url
        pids = {process["pid"] for process in cluster.workers()}
        assert not pids & {process["pid"] for process in other.workers()}
        greedy = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True}
        whole = other.complete(**greedy, baton={"strict": True})
        assert whole.path == "remote"

        other.signal("prefill-0", signal.SIGTERM)
        poll(lambda: not other.workers("prefill"), "the prefill worker does not end", 30.0)
        for options in ({"strict": True}, {"path": "remote"}, {"path": "remote", "strict": True}):
            refused = other.complete(**greedy, baton=options)
            assert refused.status == 503
            assert refused.body["error"].keys() == {"message", "type", "param", "code"}
            assert refused.body["error"]["code"] == "no_worker"
            assert "no prefill worker is alive" in refused.body["error"]["message"]
            assert int(refused.headers["retry-after"]) >= 1
        for options in ({}, {"path": "auto"}, {"path": "local", "strict": True}):
            local = other.complete(**greedy, baton=options)
            assert local.path == "local"
            assert local.token_ids == whole.token_ids
        assert other.health() == 200
        other.settled()

        assert cluster.complete(**greedy, baton={"strict": True}).token_ids == whole.token_ids
        assert pids == {process["pid"] for process in cluster.workers()}


def test_without_a_decode_worker_nothing_is_served_but_said(tmp_path: Path) -> None:
    with RealCluster(tmp_path, restart=False) as lone:
        lone.signal("decode-0", signal.SIGTERM)
        poll(lambda: not lone.workers("decode"), "the decode worker does not end", 30.0)
        health = httpx.get(f"{lone.url}/health", timeout=60.0)
        assert (health.status_code, health.json()["reason"]) == (503, "no decode worker is ready")
        refused = lone.complete(prompt=PROMPT, max_tokens=2)
        assert (refused.status, refused.body["error"]["code"]) == (503, "no_worker")
