# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A session comes back after another one has prefilled, on a hybrid model.

Sliding-window layers take and give back blocks for every token. Dense checkpoints
(retention interval None) give a hash to a fifth of them, so on a single LRU list the
prefill of one long chat pushes every other chat out of a pool that is nearly empty.
"""

import pytest

from .session_utils import ALIGNMENT, Session, tokens

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
