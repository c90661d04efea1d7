# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A session comes back after another one has prefilled, on a hybrid model.

Sliding-window layers take and give back blocks for every token. Dense checkpoints
(retention interval None) give a hash to a fifth of them, so on a single LRU list the
prefill of one long chat pushes every other chat out of a pool that is nearly empty.
"""

import pytest

from vllm.distributed.kv_events import BlockStored

from .session_utils import ALIGNMENT, CHUNK, Session, tokens

pytestmark = [pytest.mark.cpu_test, pytest.mark.skip_global_cleanup]

A = tokens(0, 250_000)
B = tokens(1_000_000, 250_000)
RESEND = (len(A) - 1) // ALIGNMENT * ALIGNMENT


def test_session_survives_the_prefill_of_another():
    session = Session(interval=None)
    assert session.prefill(A) == 0
    assert session.prefill(A) == RESEND
    assert session.prefill(B) == 0
    assert session.prefill(A) == RESEND == 249_856


def test_branch_off_the_middle_survives_the_prefill_of_another():
    session = Session(interval=None)
    session.prefill(A)
    session.prefill(B)
    # As the pool fills, checkpoints thin out to every 512, 1,024, ... tokens.
    fork = 128 * ALIGNMENT
    assert session.prefill(A[:fork] + tokens(2_000_000, 1_000)) == fork
    assert session.prefill(A) == RESEND


def test_system_prompt_survives_the_prefill_of_another():
    session = Session(interval=None)
    system = tokens(3_000_000, 80 * ALIGNMENT)
    session.prefill(system + tokens(4_000_000, 2_500))
    session.prefill(B)
    assert session.prefill(system + tokens(5_000_000, 2_500)) == len(system)


@pytest.mark.parametrize("use_eagle", [False, True])
def test_checkpoint_that_was_hit_survives_the_prefill_of_another(use_eagle):
    session = Session(interval=None, use_eagle=use_eagle)
    session.prefill(A[:50_000])
    hit, other = 101 * ALIGNMENT, 151 * ALIGNMENT
    # With EAGLE a hit ends one block before what it has found.
    fork, other_fork = (n + use_eagle * ALIGNMENT for n in (hit, other))
    assert session.prefill(A[:fork] + tokens(2_000_000, 1_000)) == hit
    session.prefill(B)
    assert session.prefill(A[:fork] + tokens(8_000_000, 1_000)) == hit
    assert session.prefill(A[:other_fork] + tokens(9_000_000, 1_000)) < other


def test_prefill_caches_no_checkpoint_that_it_would_evict_again():
    session = Session(interval=None, num_blocks=6_000, enable_kv_cache_events=True)

    def stored(prompt: list[int]) -> int:
        session.manager.take_events()
        session.prefill(prompt)
        events = session.manager.take_events()
        return sum(len(e.block_hashes) for e in events if isinstance(e, BlockStored))

    steps = 12 * CHUNK
    in_one_step_of_an_empty_pool = stored(tokens(6_000_000, CHUNK))
    session.prefill(A[:steps])
    assert stored(B[:steps]) < 4 * in_one_step_of_an_empty_pool
    # Nothing follows the last step: all of its checkpoints are there.
    fork = steps - 3 * ALIGNMENT
    assert session.prefill(B[:fork] + tokens(7_000_000, 100)) == fork


def test_prefill_that_is_cut_short_resumes_where_it_was():
    session = Session(interval=None, num_blocks=6_000)
    for first in range(4_000_000, 5_200_000, 100_000):
        session.prefill(tokens(first, 50_000))
    last = tokens(first, 50_000)
    session.prefill(B[:100_000], num_tokens=5 * CHUNK)
    assert session.prefill(B[:100_000]) == 5 * CHUNK
    assert session.prefill(last) == (len(last) - 1) // ALIGNMENT * ALIGNMENT
