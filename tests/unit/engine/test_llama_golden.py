"""The real model against token ids and logits that another engine computed from the same weights."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.engine.weights.prepared import WEIGHTS_FILE
from tests.support_model import PagedSequences, real_model, real_prepared

GOLDEN = json.loads((Path(__file__).parents[2] / "data" / "golden" / "smollm2.json").read_text())
NEAR_TIE = 0.001
LOGIT_TOLERANCE = 5e-4

Case = dict[str, Any]


def _expected(case: Case) -> list[int]:
    ids: list[int] = case.get("forced_ids", case["output_ids"])
    return ids


LONG_PROMPT = 1000


@pytest.fixture(scope="module", params=["short", pytest.param("long", marks=pytest.mark.slow)])
def replay(request: pytest.FixtureRequest) -> tuple[list[Case], torch.Tensor]:
    """Logits [cases, 64, vocab] of every golden case, its own tokens fed back: an argmax that agrees everywhere is a
    greedy generation that agrees. Prompts run whole, one a batch; all cases decode in one batch of unequal lengths."""
    every = GOLDEN["chat"] + GOLDEN["text"]
    cases = [case for case in every if (len(case["prompt_ids"]) > LONG_PROMPT) == (request.param == "long")]
    num_steps = len(_expected(cases[0]))
    longest = max(len(case["prompt_ids"]) for case in cases) + num_steps
    sequences = PagedSequences(real_model(), len(cases), longest)
    first = torch.cat([sequences.step({i: case["prompt_ids"]}) for i, case in enumerate(cases)])
    forced = zip(*(_expected(case)[:-1] for case in cases), strict=True)
    steps = [sequences.step({i: [token] for i, token in enumerate(tokens)}) for tokens in forced]
    return cases, torch.stack([first, *steps], dim=1)


def test_greedy_tokens_are_golden(replay: tuple[list[Case], torch.Tensor]) -> None:
    cases, logits = replay
    excused, wrong = [], []
    for case, chosen in zip(cases, logits.argmax(dim=-1).tolist(), strict=True):
        assert len(_expected(case)) == len(case["margins"]) == len(chosen)
        for k, (ours, golden, margin) in enumerate(zip(chosen, _expected(case), case["margins"], strict=True)):
            if ours != golden:
                (excused if margin < NEAR_TIE else wrong).append((case["name"], k, ours, golden, margin))
    print(f"golden: {logits.shape[0] * logits.shape[1]} tokens, {len(excused)} near ties excused: {excused}")
    assert not wrong


def test_greedy_chats_are_golden_with_float16_keys_and_values() -> None:
    cases = GOLDEN["chat"]
    longest = max(len(case["prompt_ids"]) for case in cases) + len(_expected(cases[0]))
    sequences = PagedSequences(real_model("float16"), len(cases), longest)
    logits = sequences.step({i: case["prompt_ids"] for i, case in enumerate(cases)})
    forced = zip(*(_expected(case)[:-1] for case in cases), strict=True)
    steps = [sequences.step({i: [token] for i, token in enumerate(tokens)}) for tokens in forced]
    chosen = torch.stack([logits, *steps], dim=1).argmax(dim=-1).tolist()
    for case, ours in zip(cases, chosen, strict=True):
        assert ours == _expected(case), case["name"]


def test_greedy_stops_where_the_golden_chat_answers_stop(replay: tuple[list[Case], torch.Tensor]) -> None:
    cases, logits = replay
    assert real_model().eos_token_ids == {2}
    for case, chosen in zip(cases, logits.argmax(dim=-1).tolist(), strict=True):
        if "forced_ids" in case:
            stop = chosen.index(2) + 1 if 2 in chosen else len(chosen)
            assert chosen[:stop] == case["output_ids"]


def test_mapped_weights_stay_shared(replay: tuple[list[Case], torch.Tensor]) -> None:
    """After all that computing, none of the weights' pages is this process's own: more workers need no more memory."""
    weights = real_prepared().directory / WEIGHTS_FILE
    kib: Counter[str] = Counter()
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, _, value = line.partition(":")
        if value.endswith(" kB"):
            kib[key] += int(value.split()[0]) if inside else 0
        elif "-" in key.split(" ")[0]:
            inside = line.endswith(str(weights))
    assert kib["Rss"] * 1024 > 0.9 * weights.stat().st_size
    assert kib["Private_Dirty"] == kib["Anonymous"] == 0


def test_logits_and_margins_agree(replay: tuple[list[Case], torch.Tensor]) -> None:
    cases, logits = replay
    top = logits.topk(2, dim=-1).values
    margins = torch.tensor([case["margins"] for case in cases])
    torch.testing.assert_close(top[..., 0] - top[..., 1], margins, rtol=0, atol=2 * LOGIT_TOLERANCE)
    for case, first in zip(cases, logits[:, 0], strict=True):
        for token, logit in case.get("first_logits_top5", ()):
            assert abs(first[token].item() - logit) < LOGIT_TOLERANCE
