"""The real model with float16 weights: the same golden tokens, and still no memory of its own."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from shared.engine.models.base import Model
from shared.engine.models.registry import load_model
from tests.support_golden import NEAR_TIE
from tests.support_model import PagedSequences, real_prepared

GOLDEN = json.loads((Path(__file__).parents[2] / "data" / "golden" / "smollm2.json").read_text())
CASES = GOLDEN["chat"] + [case for case in GOLDEN["text"] if case["name"] == "text-129"]


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(real_prepared().directory, weights="float16")


def test_greedy_tokens_are_golden(model: Model) -> None:
    """Its own tokens fed back, as for float32; all cases decode in one batch."""
    expected = [case.get("forced_ids", case["output_ids"]) for case in CASES]
    longest = max(len(case["prompt_ids"]) for case in CASES) + len(expected[0])
    sequences = PagedSequences(model, len(CASES), longest)
    first = torch.cat([sequences.step({i: case["prompt_ids"]}) for i, case in enumerate(CASES)])
    forced = zip(*(tokens[:-1] for tokens in expected), strict=True)
    steps = [sequences.step({i: [token] for i, token in enumerate(tokens)}) for tokens in forced]
    chosen = torch.stack([first, *steps], dim=1).argmax(dim=-1).tolist()
    wrong = [
        (case["name"], k, ours, golden)
        for case, tokens, right in zip(CASES, chosen, expected, strict=True)
        for k, (ours, golden, margin) in enumerate(zip(tokens, right, case["margins"], strict=True))
        if ours != golden and margin >= NEAR_TIE
    ]
    assert not wrong


def test_packed_weights_stay_shared(model: Model) -> None:
    sequences = PagedSequences(model, 1, 8)
    sequences.step({0: [1, 2, 3]})
    weights = real_prepared().directory / "weights-float16.safetensors"
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
