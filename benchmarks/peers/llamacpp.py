"""llama.cpp by its own server, in-process. Arguments: threads, GGUF file. Rates are those that it reports itself."""

import json
import sys
from typing import Any

import xllamacpp as xl  # type: ignore[import-not-found]
from lines import prompt, serve  # type: ignore[import-not-found]

_ROOM = 128


def start() -> Any:
    num_threads, file = int(sys.argv[1]), sys.argv[2]
    servers: dict[tuple[int, int], Any] = {}

    def server(slots: int, slot_len: int) -> Any:
        """One at a time: each holds the KV of all its slots."""
        if (slots, slot_len) not in servers:
            servers.clear()
            params = xl.CommonParams()
            params.model.path = file
            params.n_parallel, params.n_ctx, params.kv_unified = slots, slots * slot_len, False
            params.n_batch, params.n_ubatch, params.cache_ram_mib = 2048, 512, 0
            params.cpuparams.n_threads = params.cpuparams_batch.n_threads = num_threads
            params.cpuparams.poll = params.cpuparams_batch.poll = 0
            params.verbosity = 0
            servers[slots, slot_len] = xl.Server(params)
        return servers[slots, slot_len]

    def complete(engine: Any, **request: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []

        def collect(answer: Any) -> None:
            answer = json.loads(answer) if isinstance(answer, str | bytes) else answer
            found.extend(answer if isinstance(answer, list) else [answer])

        returned = engine.handle_completions(
            {"temperature": 0, "ignore_eos": True, "timings_per_token": False, "stream": False} | request, collect
        )
        if not found and returned is not None:
            collect(returned)
        if not found or any("timings" not in answer for answer in found):
            raise RuntimeError(f"llama.cpp answered {str(found)[:500]}")
        return found

    def measure(kind: str, **arguments: int) -> float:
        if kind == "prefill":
            length = arguments["length"]
            engine = server(1, length + _ROOM)
            [answer] = complete(engine, prompt=prompt(length, arguments["seed"]), n_predict=1, cache_prompt=False)
            return float(answer["timings"]["prompt_per_second"])
        batch, context = arguments["batch"], arguments["context"]
        engine = server(batch, context + arguments["steps"] + _ROOM)
        answers = complete(engine, prompt=prompt(context, 1), n_predict=arguments["steps"], n_cmpl=batch)
        if len(answers) != batch:
            raise RuntimeError(f"{len(answers)} answers for a batch of {batch}")
        return sum(float(answer["timings"]["predicted_per_second"]) for answer in answers)

    return measure


if __name__ == "__main__":
    serve(start)
