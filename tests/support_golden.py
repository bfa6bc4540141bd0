"""Token ids that another engine computed from the same weights, and the one excuse for not meeting them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NEAR_TIE = 0.001
"""Where the two best logits are closer than this, rounding may choose the other one."""

_FILE = Path(__file__).parent / "data" / "golden" / "smollm2.json"
GOLDEN: dict[str, Any] = json.loads(_FILE.read_text())
LONG_TEXT: tuple[int, ...] = tuple(max((case["prompt_ids"] for case in GOLDEN["text"]), key=len))


@dataclass(frozen=True)
class GoldenCase:
    """user: a chat message, to be sent as such; else the prompt is sent as ids, and the model goes on past its end
    tokens. margins: best logit less the second, for each token."""

    name: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    margins: tuple[float, ...]
    user: str | None = None
    text: str | None = None

    def body(self) -> dict[str, Any]:
        """What to ask for; greedy is the default of whoever asks."""
        if self.user is not None:
            return {
                "route": "/v1/chat/completions",
                "messages": [{"role": "user", "content": self.user}],
                "max_tokens": 64,
            }
        return {"prompt": list(self.prompt), "max_tokens": 64, "ignore_eos": True}

    def difference(self, tokens: list[int]) -> int | None:
        """Index of the first token that is not golden; None where all are."""
        pairs = zip(tokens, self.tokens, strict=False)
        first = next((k for k, (ours, golden) in enumerate(pairs) if ours != golden), None)
        return min(len(tokens), len(self.tokens)) if first is None and len(tokens) != len(self.tokens) else first

    def excuses(self, index: int) -> bool:
        return index < len(self.margins) and self.margins[index] < NEAR_TIE


def golden_cases() -> list[GoldenCase]:
    """29: each chat message as a chat, and as ids past its end; each text as ids."""
    cases = []
    for chat in GOLDEN["chat"]:
        prompt, margins = tuple(chat["prompt_ids"]), tuple(chat["margins"])
        answer = chat["output_text"].removesuffix("<|im_end|>")
        cases.append(GoldenCase(chat["name"], prompt, tuple(chat["output_ids"]), margins, chat["user"], answer))
        cases.append(GoldenCase(f"{chat['name']} (ids)", prompt, tuple(chat["forced_ids"]), margins))
    for text in GOLDEN["text"]:
        ids, margins = tuple(text["output_ids"]), tuple(text["margins"])
        cases.append(GoldenCase(text["name"], tuple(text["prompt_ids"]), ids, margins, text=text["output_text_plain"]))
    return cases
