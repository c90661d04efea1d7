# SPDX-License-Identifier: Apache-2.0
"""Random text of a given number of tokens: no two runs share a prefix."""

import random
from collections.abc import Awaitable, Callable

_ONSETS = ["b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z"]
_VOWELS = ["a", "e", "i", "o", "u"]
GUESS_TOKENS_PER_CHAR = 0.4

Count = Callable[[str], Awaitable[int | None]]


class Writer:
    """Writes text of made-up words.

    Attributes:
        tokens_per_char: How many tokens a character takes, as last measured.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.SystemRandom()
        self.tokens_per_char = GUESS_TOKENS_PER_CHAR

    def words(self, characters: int) -> str:
        """About ``characters`` characters of text, at least one word."""
        words, length = [], 0
        while length < characters or not words:
            word = "".join(self._syllable() for _ in range(self._rng.randint(2, 4)))
            words.append(word)
            length += len(word) + 1
        return " ".join(words)

    async def text(self, tokens: int, count: Count) -> str:
        """Text of at most ``tokens`` tokens, and at least 97 % of them.

        Args:
            tokens: Tokens wanted, at least 1.
            count: Tokens of a text, None when the server does not tell: the length
                then rests on ``tokens_per_char``.
        """
        text = self.words(int(tokens / self.tokens_per_char) + 8)
        for _ in range(6):
            counted = await count(text)
            if counted is None:
                return text[: int(tokens / self.tokens_per_char)]
            if tokens * 0.97 <= counted <= tokens:
                break
            self.tokens_per_char = counted / len(text)
            text = self._resized(text, int(tokens / self.tokens_per_char))
        return text

    def _resized(self, text: str, characters: int) -> str:
        if characters > len(text):
            return text + " " + self.words(characters - len(text) - 1)
        return text[: max(1, characters)]

    def _syllable(self) -> str:
        return self._rng.choice(_ONSETS) + self._rng.choice(_VOWELS)
