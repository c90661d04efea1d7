# SPDX-License-Identifier: Apache-2.0
"""Scale: does the cost of a step stay flat, and the hit rate at the bound?"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from vllm_pr.bench.sweep import upper_bound
from vllm_pr.bench.workers import CHANGED, Workers
from vllm_pr.bench.workloads import returning_sessions
from vllm_pr.scenarios import DEEPSEEK_V4_FLASH

CHUNK_TOKENS = 8192


@dataclass(frozen=True)
class Size:
    """A pool and the sessions that it must hold.

    Attributes:
        about: one line for a reader.
        blocks: size of the pool in blocks.
        sessions: how many there are.
        tokens: length of the first prompt of each, in tokens.
        returns: how often one of them comes back.
    """

    about: str
    blocks: int
    sessions: int
    tokens: int
    returns: int


@dataclass(frozen=True)
class Scaled:
    """What came out.

    Attributes:
        size: what was run.
        hit_rate: of the requests that came back.
        bound: the same on an unbounded pool.
        peak_blocks: most blocks in use at once.
        us_per_step: median CPU time of a prefill step of 8,192 tokens, µs, in each
            tenth of the first visits.
    """

    size: Size
    hit_rate: float
    bound: float
    peak_blocks: int
    us_per_step: list[float] = field(default_factory=list)

    @property
    def growth(self) -> float:
        """Time of a step in the last tenth to that in the second.

        The first tenth still finds blocks that never held anything.
        """
        return self.us_per_step[-1] / self.us_per_step[1]


def blocks_to_hold(contexts: int, tokens: int) -> int:
    """Blocks of a pool in which so many finished contexts fit, one of them prefilling.

    A finished context keeps its full-attention blocks and what a hit at its end needs;
    a prefill takes all groups' blocks of a step and of the one before.
    """
    groups = DEEPSEEK_V4_FLASH.groups
    windows = [group for group in groups if group.window]
    kept = sum(tokens // g.block_size for g in groups if not g.window) + sum(
        -(-g.window // g.block_size) for g in windows if g.window
    )
    step = sum(2 * CHUNK_TOKENS // group.block_size for group in windows)
    return contexts * kept + step


SIZES = (
    Size(
        "14 contexts of 1M tokens, a pool that holds 14",
        blocks_to_hold(14, 1_000_000),
        sessions=14,
        tokens=1_000_000 - CHUNK_TOKENS,
        returns=28,
    ),
    Size(
        "1,000 sessions of 50k tokens, 1,000,000 blocks",
        1_000_000,
        sessions=1_000,
        tokens=50_000,
        returns=1_000,
    ),
)


def measure_scale(workers: Workers) -> Iterator[Scaled]:
    """Serve each size on changed.

    Raises:
        BenchError: a measurement failed.
    """
    for size in SIZES:
        keywords = {
            "sessions": size.sessions,
            "tokens": size.tokens,
            "returns": size.returns,
        }
        result = workers.run(
            CHANGED,
            "scale",
            groups=DEEPSEEK_V4_FLASH.name,
            blocks=size.blocks,
            **keywords,
        )
        asks = returning_sessions(**keywords)
        yield Scaled(
            size,
            result["hit_rate"],
            _bound_of_returns(asks, size.sessions),
            result["peak_blocks"],
            result["us_per_step"],
        )


def _bound_of_returns(asks: list, sessions: int) -> float:
    """The bound for the returns alone; first visits hit nothing."""
    prompts = sum(ask.prompt_tokens for ask in asks)
    returned = sum(ask.prompt_tokens for ask in asks[sessions:])
    return upper_bound(asks, DEEPSEEK_V4_FLASH) * prompts / returned
