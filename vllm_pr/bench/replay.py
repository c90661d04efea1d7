# SPDX-License-Identifier: Apache-2.0
"""Serve a workload on a real ``KVCacheManager`` and count prefix-cache hits."""

import itertools
from collections.abc import Callable, Iterable

from vllm_pr.bench.hashing import PieceHasher
from vllm_pr.driver import DEFAULT, Driver, Served, block_sizes
from vllm_pr.scenarios import Ask, Geometry


class Replay:
    """A `Driver` whose requests are given as texts.

    Args:
        geometry: the model's KV cache groups.
        blocks: size of the pool in blocks.
        interval: as for `Driver`.
        hash_bytes: length of a block hash.
        **driver: further arguments of `Driver`.
    """

    def __init__(
        self,
        geometry: Geometry,
        blocks: int,
        interval: int | None | str = DEFAULT,
        hash_bytes: int = 8,
        **driver: object,
    ) -> None:
        self.driver = Driver(geometry, blocks, interval, **driver)
        self.hasher = PieceHasher(block_sizes(geometry)[1], hash_bytes)
        self.driver.block_hasher = self.hasher
        self._ids = (f"ask-{i}" for i in itertools.count())

    def serve(
        self, ask: Ask, on_step: Callable[[int], object] = lambda tokens: None
    ) -> Served:
        """Serve one request to its end, alone.

        Args:
            ask: the request.
            on_step: called after each scheduler step with the tokens it scheduled.

        Raises:
            OutOfBlocks: if the pool cannot hold it.
        """
        request_id = next(self._ids)
        self.hasher.expect(request_id, (*ask.prompt, ask.output))
        try:
            request = self.driver.request([0] * ask.prompt_tokens, request_id)
            served = Served(request.num_prompt_tokens, 0)
            output = [0] * ask.output.tokens
            for tokens in self.driver.steps(request, output, served):
                on_step(tokens)
                served.steps += 1
                served.peak_blocks = max(served.peak_blocks, self.driver.used_blocks)
            return served
        finally:
            self.hasher.forget(request_id)

    def hit_rate(self, asks: Iterable[Ask]) -> float:
        """Share of all prompt tokens that the prefix cache served."""
        served = [self.serve(ask) for ask in asks]
        tokens = sum(one.prompt_tokens for one in served)
        return sum(one.cached_tokens for one in served) / tokens
