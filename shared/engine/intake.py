"""What a reservation becomes: a group as the scheduler knows it, or a refusal that says what is wrong with it."""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.engine.api import NEW, Past
from shared.engine.sequence import Choice, Group
from shared.protocol.messages import SamplingSpec
from shared.runtime.errors import InvalidRequest
from shared.transfer.link import TicketKey


@dataclass(frozen=True, slots=True)
class Intake:
    """What of the model decides whether a request can be taken at all."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]

    def group(
        self, key: TicketKey, prompt: tuple[int, ...], sampling: SamplingSpec, past: Past, *, decodes: bool
    ) -> Group:
        """InvalidRequest where the model could never take it, or where it can have no such past."""
        room = self.max_model_len - len(prompt)
        if not prompt:
            raise InvalidRequest("the prompt is empty")
        if room < 1:
            raise InvalidRequest(
                f"the prompt has {len(prompt)} tokens; with at least one new token it may have {self.max_model_len - 1}"
            )
        self._check_ids(prompt)
        max_new = min(sampling.max_tokens, room)
        self._check_past(past, sampling, max_new)
        outputs = past.outputs or ((),) * sampling.n
        choices = [Choice(k, list(tokens), done=k in past.finished) for k, tokens in enumerate(outputs)]
        return Group(key, prompt, sampling, decodes, max_new, choices, past.trunk(prompt))

    def _check_ids(self, tokens: Sequence[int]) -> None:
        if min(tokens) < 0 or max(tokens) >= self.vocab_size:
            raise InvalidRequest(f"token ids must be 0 to {self.vocab_size - 1}")

    def _check_past(self, past: Past, sampling: SamplingSpec, max_new: int) -> None:
        if past == NEW:
            return
        if len(past.outputs) not in (0, sampling.n):
            raise InvalidRequest(f"there are {sampling.n} choices, and {len(past.outputs)} of them have a past")
        if past.finished and max(past.finished) >= len(past.outputs):
            raise InvalidRequest(f"choice {max(past.finished)} is finished, and {len(past.outputs)} have a past")
        if past.outputs and len(set(past.finished)) == len(past.outputs):
            raise InvalidRequest("every choice is finished: nothing is left to do")
        ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self.eos_token_ids)
        for choice, tokens in enumerate(past.outputs):
            if tokens:
                self._check_ids(tokens)
            if len(tokens) > max_new:
                raise InvalidRequest(f"choice {choice} has {len(tokens)} tokens already, of at most {max_new}")
            if choice not in past.finished and (len(tokens) == max_new or not ends.isdisjoint(tokens)):
                raise InvalidRequest(f"choice {choice} is finished by the tokens that it has already")
