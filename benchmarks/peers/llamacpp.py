"""llama.cpp by its own server, in-process. Arguments: threads, GGUF file. Rates are those that it reports itself."""

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
            params.verbosity = 0
            servers[slots, slot_len] = xl.Server(params)
        return servers[slots, slot_len]

    def timings(engine: Any, choices: int, **request: Any) -> dict[str, float]:
        """Of the first of `choices` continuations of one prompt, each with a copy of its state; all run in step."""
        answers: list[dict[str, Any]] = []
        greedy = {"temperature": 0, "ignore_eos": True, "stream": False, "n_cmpl": choices}
        engine.handle_completions(greedy | request, answers.append)
        if len(answers) != 1 or len(answers[0].get("choices", ())) != choices:
            raise RuntimeError(f"llama.cpp answered {str(answers)[:500]}")
        found: dict[str, float] = answers[0]["timings"]
        return found

    def measure(kind: str, **arguments: int) -> float:
        if kind == "prefill":
            length = arguments["length"]
            ids = prompt(length, arguments["seed"])
            return timings(server(1, length + _ROOM), 1, prompt=ids, n_predict=1, cache_prompt=False)[
                "prompt_per_second"
            ]
        batch, context, steps = arguments["batch"], arguments["context"], arguments["steps"]
        engine = server(batch, context + steps + _ROOM)
        return batch * timings(engine, batch, prompt=prompt(context, 1), n_predict=steps)["predicted_per_second"]

    return measure


if __name__ == "__main__":
    serve(start)
