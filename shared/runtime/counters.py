"""Counts of what happened, shown in `/cluster` and `/metrics`. They only rise."""

from collections import Counter


class Counters:
    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        self._counts[name] += count

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def as_dict(self) -> dict[str, float]:
        return {name: float(count) for name, count in sorted(self._counts.items())}
