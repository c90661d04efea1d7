# SPDX-License-Identifier: Apache-2.0
"""Block hashes of a prompt that is known by its pieces, without token ids.

The managers need of a block hash only that it is equal where the prefixes are equal.
A prefix is the chain of texts that it is made of, so a number for each chain and an
offset into its last text say the same as hashing some hundred thousand token ids.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from vllm_pr.scenarios import Text


def merged(pieces: Iterable[Text]) -> list[Text]:
    """The same text in as few pieces as possible, none of them empty."""
    texts: list[Text] = []
    for piece in pieces:
        if texts:
            last = texts[-1]
            if last.key == piece.key and last.start + last.tokens == piece.start:
                texts[-1] = Text(last.key, last.tokens + piece.tokens, last.start)
                continue
        if piece.tokens:
            texts.append(piece)
    return texts


class PieceHasher:
    """A block hasher for ``Request``: hashes blocks of ``block_size`` tokens.

    Args:
        block_size: tokens a hash covers.
        hash_bytes: length of a hash, at least 8; SHA-256 has 32.
    """

    def __init__(self, block_size: int, hash_bytes: int = 8) -> None:
        self._block_size = block_size
        self._padding = hash_bytes // 4 - 2
        self._chains: dict[tuple[int, int, str, int], int] = {}
        self._hashes: dict[str, list[bytes]] = {}

    def expect(self, request_id: str, pieces: Iterable[Text]) -> None:
        """Announce the text of a request, prompt and output."""
        self._hashes[request_id] = self.hashes(merged(pieces))

    def forget(self, request_id: str) -> None:
        """Drop the text of a finished request."""
        del self._hashes[request_id]

    def __call__(self, request: Any) -> list[bytes]:
        """The hashes of the blocks that have become full since the last call."""
        full = request.num_tokens // self._block_size
        return self._hashes[request.request_id][len(request.block_hashes) : full]

    def hashes(self, texts: Sequence[Text]) -> list[bytes]:
        """One hash a full block of the concatenated texts, each merged."""
        lengths = np.array([text.tokens for text in texts])
        text_ends = np.cumsum(lengths)
        total = int(text_ends[-1]) if len(texts) else 0
        ends = np.arange(self._block_size, total + 1, self._block_size)
        if not len(ends):
            return []
        text_of = np.searchsorted(text_ends, ends)
        words = np.zeros((len(ends), 2 + self._padding), dtype=">u4")
        words[:, 0] = np.array(self._chain(texts))[text_of]
        words[:, 1] = ends - (text_ends - lengths)[text_of]
        return words.view(f"V{4 * words.shape[1]}").ravel().tolist()

    def _chain(self, texts: Sequence[Text]) -> list[int]:
        """A number for each prefix of ``texts``, without the last one's length."""
        numbers, parent, length = [], 0, 0
        for text in texts:
            link = (parent, length, text.key, text.start)
            parent = self._chains.setdefault(link, len(self._chains) + 1)
            length = text.tokens
            numbers.append(parent)
        return numbers
