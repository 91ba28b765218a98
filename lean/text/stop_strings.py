"""Stop strings: end a stream of text before the first of them, in whichever pieces the text arrives."""

from collections.abc import Sequence


class StopStrings:
    """Filters the text of one sequence.

    The first stop string to be completed ends the text. If several are completed by the same character, the longest
    counts. So the result does not depend on the pieces, and text that was returned stays valid.

    Args:
        stop: the stop strings, none of them empty.

    Attributes:
        stopped: a stop string was found; everything after it is dropped.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self.stopped = False
        self._stop = tuple(stop)
        self._borders = [_borders(text) for text in self._stop]
        self._matched = [0] * len(self._stop)  # characters of each stop string that the text so far ends with
        self._held = ""  # the end of the text that may be the beginning of a stop string

    def add(self, piece: str) -> str:
        """The text that became certain to be before every stop string; may be empty."""
        if self.stopped:
            return ""
        if not self._stop:
            return piece
        text = self._held + piece
        for end in range(len(self._held), len(text)):
            found = self._advance(text[end])
            if found:
                self.stopped, self._held = True, ""
                return text[: end + 1 - found]
        certain = len(text) - max(self._matched)
        self._held = text[certain:]
        return text[:certain]

    def _advance(self, character: str) -> int:
        """Match one more character (Knuth, Morris, Pratt); the length of the longest stop string now complete, or 0."""
        found = 0
        for i, (stop, borders) in enumerate(zip(self._stop, self._borders)):
            length = self._matched[i]
            while length and stop[length] != character:
                length = borders[length - 1]
            if stop[length] == character:
                length += 1
            self._matched[i] = length
            if length == len(stop):
                found = max(found, length)
        return found

    def finish(self) -> str:
        """End the text: returns what was held back, or nothing after a stop string."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stop)
        return held


def _borders(text: str) -> list[int]:
    """For each prefix of text: the length of its longest proper suffix that text begins with."""
    borders = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = borders[length - 1]
        if text[i] == text[length]:
            length += 1
        borders[i] = length
    return borders
