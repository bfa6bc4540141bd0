"""Prompts that any tokenizer cuts about alike: common English words, in an order that only the seed decides."""

import random
from dataclasses import dataclass

_TEXT = """
the of and to in is that for it was on are as with they at be this from have or by one had not but what all were
when we there can an your which their said if do will each about how up out them then she many some so these
would other into has more her two like him see time could no make than first been its who now people my made
over did down only way find use may water long little very after words called just where most know get through
back much go good new write our me man too any day same right look think also around another came come work
three must because does part even place well such here take why help put different away again off went old
number great tell men say small every found still between name should home big give air line set own under read
last never us left end along while might next sound below saw something thought both few those always show large
often together asked house world going want school important until form food keep children feet land side
without boy once animal life enough took four head above kind began almost live page got earth need far hand
high year mother light country father let night picture being study second soon story since white ever paper
hard near sentence better best across during today however sure knew try told young sun thing whole hear example
heard several change answer room sea against top turned
"""
WORDS = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class Measure:
    """How many tokens the server makes of our words: `base` of its own (a template, a begin mark), `slope` of each."""

    base: float = 0.0
    slope: float = 1.0

    def words_for(self, tokens: int) -> int:
        return max(1, round((tokens - self.base) / self.slope))


class PromptWriter:
    """Prompt `number` is the same in every run with the same seed. Behind the shared prefix no two prompts begin alike:
    the first word tells 250 of them apart, the first two more than 60,000."""

    def __init__(self, seed: int, measure: Measure, shared_prefix: int = 0) -> None:
        self._seed = seed
        self._measure = measure
        rng = random.Random(f"{seed}:prefix")
        num_shared = measure.words_for(shared_prefix) if shared_prefix else 0
        self._shared = [rng.choice(WORDS) for _ in range(num_shared)]

    def write(self, number: int, tokens: int) -> str:
        """A prompt of about `tokens` tokens, the shared prefix included."""
        num_words = self._measure.words_for(tokens)
        rng = random.Random(f"{self._seed}:{number}")
        high, low = divmod(number + self._seed, len(WORDS))
        own = [WORDS[low], WORDS[high % len(WORDS)]]
        own += [rng.choice(WORDS) for _ in range(num_words - len(self._shared) - len(own))]
        return " ".join([*self._shared, *own][:num_words])
