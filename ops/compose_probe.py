"""What `ops/compose_check.sh` asks of a cluster in containers. Standard library only: it needs no installed Baton.

compose_probe.py roles URL prefill=2 decode=2   until so many of each are ready, under different names
compose_probe.py ask URL BACKEND FILE           greedy completions, each over BACKEND; the same as in FILE, if it is
                                                there
compose_probe.py load URL,URL NUM_CLIENTS DIR   streams until DIR/stop is there, then says how many failed
compose_probe.py shared URL NUM_DECODE          until so many decode workers have each computed tokens
"""

import http.client
import json
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 300.0
POLL_S = 0.2
PROMPTS = [
    "What is the capital of France?",
    "Count from one to twenty, in words.",
    "Tell me about the sea. " * 24,
    "Why is the sky blue?",
]


def exchange(url: str, method: str, path: str, body: object = None) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_S)
    try:
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, path, data, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def get(url: str, path: str) -> Any:
    status, _, body = exchange(url, "GET", path)
    if status != 200:
        raise RuntimeError(f"GET {path}: {status} {body[:300]!r}")
    return json.loads(body)


def request_body(url: str, prompt: str, **more: object) -> dict[str, object]:
    model = get(url, "/v1/models")["data"][0]["id"]
    message = {"role": "user", "content": prompt}
    baton = {"path": "remote", "strict": True, "timings": True, "token_ids": True}
    return {"model": model, "messages": [message], "temperature": 0, "max_tokens": 24, "baton": baton, **more}


def roles(url: str, *wanted: str) -> None:
    counts = {role: int(number) for role, number in (item.split("=") for item in wanted)}
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        ready = [w for w in get(url, "/cluster")["workers"] if w["state"] == "ready"]
        found = Counter(worker["role"] for worker in ready)
        if all(found[role] == number for role, number in counts.items()):
            break
        if time.monotonic() > deadline:
            raise SystemExit(f"{url} sees {dict(found)}, not {counts}")
        time.sleep(POLL_S)
    names = [worker["id"] for worker in ready]
    if len(set(names)) != len(names):
        raise SystemExit(f"two processes have one name: {sorted(names)}")
    print(f"  {url} sees {dict(sorted(found.items()))}, each under a name of its own")


def ask(url: str, backend: str, file: str) -> None:
    answers = []
    for prompt in PROMPTS * 2:
        status, headers, body = exchange(url, "POST", "/v1/chat/completions", request_body(url, prompt))
        content = json.loads(body)
        if status != 200:
            raise SystemExit(f"status {status}: {content}")
        timings = content["baton"]["timings"]
        if headers["x-baton-path"] != "remote" or timings["backend"] != backend:
            raise SystemExit(f"path {headers['x-baton-path']}, backend {timings['backend']}: not remote over {backend}")
        answers.append(content["choices"][0]["message"]["content"])
        print(
            f"  {backend}: {sum(timings['bytes'].values()):>9} bytes, transfer {1000 * timings['transfer_s']:.0f} ms, "
            f"first token {timings['first_token_s']:.2f} s, all {timings['total_s']:.2f} s"
        )
    kept = Path(file)
    if kept.exists() and json.loads(kept.read_text()) != answers:
        raise SystemExit(f"other answers than before: {answers}, not {kept.read_text()}")
    kept.write_text(json.dumps(answers))


def stream(url: str, prompt: str) -> str | None:
    """One streamed answer; why it failed, or None."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_S)
    finish = ""
    try:
        data = json.dumps(request_body(url, prompt, stream=True)).encode()
        connection.request("POST", "/v1/chat/completions", data, {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            return f"status {answer.status}: {answer.read()[:300]!r}"
        for line in answer:
            text = line.decode().strip()
            if text == "data: [DONE]":
                return None if finish in ("stop", "length") else f"finish_reason {finish!r}"
            if text.startswith("data: "):
                event = json.loads(text[6:])
                if "error" in event:
                    return f"error in the stream: {event['error']}"
                finish = next((c["finish_reason"] for c in event["choices"] if c["finish_reason"]), finish)
        return "the stream ended early"
    except (OSError, http.client.HTTPException, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        connection.close()


def load(urls: str, num_clients: str, directory: str) -> None:
    gateways, place = urls.split(","), Path(directory)
    lock, outcomes, took = threading.Lock(), Counter[str](), list[float]()

    def client(number: int) -> None:
        turn = number
        while not (place / "stop").exists():
            began = time.monotonic()
            failure = stream(gateways[turn % len(gateways)], PROMPTS[turn % len(PROMPTS)])
            turn += 1
            with lock:
                outcomes[failure or "ok"] += 1
                took.append(time.monotonic() - began)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(int(num_clients))]
    for thread in threads:
        thread.start()
    (place / "started").touch()
    for thread in threads:
        thread.join()
    took.sort()
    failures = {reason: count for reason, count in outcomes.items() if reason != "ok"}
    print(f"  {len(took)} streams, {sum(failures.values())} failed")
    if failures or not took:
        raise SystemExit(f"failed: {failures}")
    print(f"  median {took[len(took) // 2]:.2f} s, longest {took[-1]:.2f} s")


def shared(url: str, num_decode: str) -> None:
    """Counts from the moment of the call, so that it shows who takes part now."""

    def tokens() -> dict[str, float]:
        workers = [w for w in get(url, "/cluster")["workers"] if w["role"] == "decode"]
        return {worker["id"]: worker["counters"].get("tokens_generated", 0.0) for worker in workers}

    before, deadline = tokens(), time.monotonic() + TIMEOUT_S
    while True:
        gained = {name: int(count - before.get(name, 0.0)) for name, count in tokens().items()}
        if len([count for count in gained.values() if count > 0]) >= int(num_decode):
            break
        if time.monotonic() > deadline:
            raise SystemExit(f"not all take part: {gained}")
        time.sleep(POLL_S)
    print(f"  decode workers take part, in tokens: {gained}")


if __name__ == "__main__":
    {"roles": roles, "ask": ask, "load": load, "shared": shared}[sys.argv[1]](*sys.argv[2:])
