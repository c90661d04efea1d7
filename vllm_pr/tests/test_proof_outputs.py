# SPDX-License-Identifier: Apache-2.0
"""A cache hit changes no output: a session workload on the real engine.

The same requests on stock without caching, on stock and on changed. The pool is as
small as the engine accepts, so that requests are preempted and blocks reused all the
time.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from equality_kit import (
    FIRST_TOKEN,
    MOVES,
    Shape,
    contradiction,
    contradictions,
    distance,
    first_difference,
    workload,
)

from vllm_pr.engine.runner import Engine, Result, start_engine
from vllm_pr.engine.tokenizer import VOCAB_SIZE

PROBE = "vllm_pr.engine.probe"
LIKELY = 5  # log probabilities per token


@dataclass(frozen=True)
class Case:
    """A model, its workload and the engine settings that make the pool tight.

    Attributes:
        unread: Block sizes of groups whose content nothing reads after a hit.
    """

    model: str
    shape: Shape
    blocks: int
    engine_args: dict[str, Any] = field(default_factory=dict)
    seed: int = 3
    unread: frozenset[int] = frozenset()


CASES = (
    Case(
        "gemma3-tiny",
        Shape(
            rounds=24,
            together=10,
            quick=4,
            sessions=5,
            shared=150,
            step=300,
            longest=900,
            output=8,
            long_output=64,
        ),
        blocks=90,
        engine_args={"max_model_len": 1024},
    ),
    Case(
        "dsv4-tiny",
        Shape(
            rounds=8,
            together=10,
            quick=7,
            sessions=3,
            shared=270,
            step=180,
            longest=700,
            output=2,
            long_output=40,
        ),
        blocks=92,
        engine_args={"max_model_len": 768, "max_num_batched_tokens": 128},
        seed=75,
        # The state of the C128 compressor: each of its tokens ends where a hit ends.
        unread=frozenset({8}),
    ),
)


@dataclass
class Run:
    """What one engine answered."""

    results: list[Result]
    preemptions: int

    @property
    def cached_tokens(self) -> int:
        return sum(result.cached_tokens for result in self.results)


@dataclass
class Runs:
    """The same workload on three engines."""

    off: Run
    stock: Run
    changed: Run

    def pairs(self, name: str) -> list[tuple[Result, Result]]:
        """Each answer without caching, and the one of the engine called ``name``."""
        return list(zip(self.off.results, getattr(self, name).results, strict=True))

    def furthest(self, name: str) -> float:
        """Largest difference of a log probability."""
        return max(distance(*pair) for pair in self.pairs(name))

    def texts_that_differ(self, name: str) -> int:
        """How many answers are another text."""
        differ = (first_difference(*pair) is not None for pair in self.pairs(name))
        return sum(differ)


def run(engine: Engine, case: Case) -> Run:
    results = []
    for asks in workload(case.shape, case.seed):
        prompts = [ask.prompt for ask in asks]
        lengths = [ask.output_tokens for ask in asks]
        results += engine.ask_all(prompts, lengths, LIKELY)
    return Run(results, engine.call(f"{PROBE}:preemptions"))


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.model)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def runs(case: Case) -> Runs:
    done = []
    for variant in ("caching-off", "stock-default", "changed"):
        with start_engine(
            case.model, variant, blocks=case.blocks, engine_args=case.engine_args
        ) as engine:
            done.append(run(engine, case))
    return Runs(*done)


def test_workload_switches_branches_edits_and_preempts(case, runs, figure):
    asks = [ask for asks in workload(case.shape, case.seed) for ask in asks]
    assert {ask.what for ask in asks} == {"start", "quick", *MOVES}
    assert len(asks) == len(runs.changed.results)
    assert runs.off.cached_tokens == 0
    assert runs.changed.cached_tokens >= runs.stock.cached_tokens > 0
    assert min(each.preemptions for each in (runs.off, runs.stock, runs.changed)) > 0
    figure(f"equality_requests_{case.model}", len(asks))
    figure(f"equality_prompt_tokens_{case.model}", sum(len(x.prompt) for x in asks))
    figure(f"equality_cached_tokens_{case.model}", runs.changed.cached_tokens)
    figure(f"equality_preemptions_{case.model}", runs.changed.preemptions)


def test_answers_agree_as_upstream_demands(case, runs, figure):
    found = contradictions(runs.off.results, runs.changed.results)
    figure(f"equality_contradictions_{case.model}", len(found))
    assert not found


@pytest.fixture(scope="module")
def effects(case: Case, runs: Runs) -> dict[tuple[int, int], float]:
    """What one stale block does to an answer, by cache group and its block size.

    The last block of a hit is exchanged with that of another prompt, and put back.
    """
    tolerated, done = runs.furthest("stock"), {}
    with start_engine(case.model, "changed") as engine:
        length = 2 * engine.model.alignment + 100
        prompt, other = (
            random.Random(seed).choices(range(FIRST_TOKEN, VOCAB_SIZE), k=length)
            for seed in (1, 2)
        )
        cold = engine.ask(prompt, 8, LIKELY)
        engine.ask(other)
        hit, stale = (
            engine.call(f"{PROBE}:hit_blocks", prompt=each) for each in (prompt, other)
        )
        for group, size in enumerate(engine.info.group_block_sizes):
            swapped = {"one": hit[group][-1], "other": stale[group][-1]}
            engine.call(f"{PROBE}:swap_blocks", **swapped)
            poisoned = engine.ask(prompt, 8, LIKELY)
            engine.call(f"{PROBE}:swap_blocks", **swapped)
            warm = engine.ask(prompt, 8, LIKELY)
            assert warm.cached_tokens == poisoned.cached_tokens > 0
            assert contradiction(cold, warm) is None
            assert distance(cold, warm) <= tolerated
            done[group, size] = distance(cold, poisoned)
    return done


def test_one_stale_block_is_noticed(case, runs, effects, figure):
    """Clearly: it is off by more than twice what stock's furthest answer is."""
    furthest = runs.furthest("stock")
    noticed = {key: effect > 2 * furthest for key, effect in effects.items()}
    assert noticed == {key: key[1] not in case.unread for key in noticed}
    figure(f"equality_stale_blocks_planted_{case.model}", len(noticed))
    figure(f"equality_stale_blocks_noticed_{case.model}", sum(noticed.values()))
    least = min(effect for key, effect in effects.items() if noticed[key])
    figure(f"equality_stale_block_distance_{case.model}", round(least, 3))


def test_changed_differs_as_stock_does(case, runs, effects, figure):
    """Not at all where stock does not, else by far less than one stale block does.

    On a CPU whose kernels round differently with the requests of a batch, stock differs
    from itself, and which of two runs has the larger rounding error is chance.
    """
    for name in ("stock", "changed"):
        texts = runs.texts_that_differ(name)
        figure(f"equality_texts_that_differ_{case.model}_{name}", texts)
        furthest = runs.furthest(name)
        figure(f"equality_logprob_distance_{case.model}_{name}", furthest)
    stale = min(x for (_, size), x in effects.items() if size not in case.unread)
    assert runs.furthest("changed") <= (runs.furthest("stock") and stale / 2)
