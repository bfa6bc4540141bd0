"""Stop strings in text that comes in pieces."""

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string to be complete, and holds back only what may still become one.

    The result does not depend on how the text is cut into pieces. Of several that end at the same character the longest
    counts. Text goes by once: each character costs the number of stop strings, amortised.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        """include_stop: the stop string itself is emitted too. ValueError for an empty stop string."""
        if not all(stops):
            raise ValueError("a stop string may not be empty")
        self._stops = tuple(dict.fromkeys(stops))
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._include_stop = include_stop
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """(text to emit, stopped). After a stop everything is swallowed."""
        if self.stopped:
            return "", True
        if not self._stops:
            return text, False
        for position, char in enumerate(text):
            stop_len = self._advance(char)
            if stop_len:
                return self._stop(text[: position + 1], stop_len), True
        if self._include_stop:
            return text, False
        seen = self._held + text
        emit_len = len(seen) - max(self._matched)
        self._held = seen[emit_len:]
        return seen[:emit_len], False

    def finish(self) -> str:
        """What was held back: no more text comes. Empty after a stop."""
        rest, self._held = self._held, ""
        return rest

    def _stop(self, text: str, stop_len: int) -> str:
        seen = self._held + text
        self._held = ""
        self.stopped = True
        return seen if self._include_stop else seen[: len(seen) - stop_len]

    def _advance(self, char: str) -> int:
        """Takes one character; the length of the longest stop string that it completes, or 0."""
        found = 0
        for number, stop in enumerate(self._stops):
            borders, matched = self._borders[number], self._matched[number]
            while matched and stop[matched] != char:
                matched = borders[matched - 1]
            if stop[matched] == char:
                matched += 1
            self._matched[number] = matched
            if matched == len(stop):
                found = max(found, matched)
        return found


def _borders(stop: str) -> list[int]:
    """Knuth-Morris-Pratt: per prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = borders[length - 1]
        if stop[index] == stop[length]:
            length += 1
        borders[index] = length
    return borders
