# SPDX-License-Identifier: Apache-2.0
"""The eager DeepSeek-V4 operators against plain loops over the same definition."""

import math

import pytest
import torch

from vllm_pr.engine import dsv4_kernels as kernels
from vllm_pr.engine.dsv4_kernels import HEAD, NOPE, SCALE_BYTES, TOKEN_BYTES

BLOCK = 4
BLOCKS = 6
WIDTH = BLOCK * (TOKEN_BYTES + SCALE_BYTES)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def cache() -> torch.Tensor:
    """A paged cache whose blocks lie apart, as in a pool shared between layers."""
    return torch.zeros(BLOCKS, WIDTH + 128, dtype=torch.uint8)[:, :WIDTH]


@pytest.fixture
def cos_sin() -> torch.Tensor:
    angles = torch.arange(64).unsqueeze(-1) * torch.rand(32)
    return torch.cat((angles.cos(), angles.sin()), -1)


def stored(cache: torch.Tensor, latents: torch.Tensor, slots: torch.Tensor):
    kernels._write_latent(cache, slots, BLOCK, latents)
    return kernels._read_latent(cache, slots, BLOCK)


def test_latents_come_back_within_eight_bits(cache):
    slots = torch.tensor([0, 7, 23, 12])
    latents = torch.randn(4, HEAD) * torch.tensor([[1e-6], [1.0], [30.0], [400.0]])
    back = stored(cache, latents, slots)
    rope = latents[:, NOPE:].bfloat16().float()
    assert torch.equal(back[:, NOPE:], rope)
    largest = latents[:, :NOPE].abs().unflatten(-1, (-1, 64)).amax(-1, keepdim=True)
    error = (back - latents)[:, :NOPE].abs().unflatten(-1, (-1, 64))
    assert (error <= largest / 16 + 1e-6).all()


def test_slots_below_zero_store_nothing_and_disturb_nothing(cache):
    first = stored(cache, torch.ones(1, HEAD), torch.tensor([5]))
    before = cache.clone()
    kernels._write_latent(cache, torch.tensor([-1, -1]), BLOCK, torch.randn(2, HEAD))
    assert torch.equal(cache, before)
    kernels._write_latent(cache, torch.tensor([4, 6]), BLOCK, torch.randn(2, HEAD))
    assert torch.equal(kernels._read_latent(cache, torch.tensor([5]), BLOCK), first)


def test_rotation_and_back(cos_sin):
    x, positions = torch.randn(5, 3, HEAD), torch.tensor([0, 1, 9, 30, 63])
    turned = kernels.rotate_tail(x, positions, cos_sin)
    assert torch.equal(turned[..., :NOPE], x[..., :NOPE])
    assert torch.equal(turned[0], x[0])
    for t, h, i in ((1, 0, 0), (3, 2, 31)):
        cos, sin = cos_sin[positions[t], i], cos_sin[positions[t], 32 + i]
        even, odd = x[t, h, NOPE + 2 * i], x[t, h, NOPE + 2 * i + 1]
        got = turned[t, h, NOPE + 2 * i : NOPE + 2 * i + 2]
        want = torch.stack((even * cos - odd * sin, even * sin + odd * cos))
        assert torch.allclose(got, want, atol=1e-5)
    back = kernels.rotate_tail(turned, positions, cos_sin, inverse=True)
    assert torch.allclose(back, x, atol=1e-5)


def attention(q, latents, sink, scale):
    """One query head over its visible latents; the sink has no value."""
    if not len(latents):
        return torch.zeros(HEAD)
    scores = torch.tensor([float(q @ latent) * scale for latent in latents])
    total = sum(math.exp(score) for score in scores) + math.exp(sink)
    return sum(
        (
            math.exp(s) / total * latent
            for s, latent in zip(scores, latents, strict=True)
        ),
        start=torch.zeros(HEAD),
    )


def test_attention_over_window_and_compressed(cache):
    compressed = torch.zeros(BLOCKS, WIDTH, dtype=torch.uint8)
    every = torch.arange(BLOCKS * BLOCK)
    window = stored(cache, torch.randn(len(every), HEAD), every)
    dense = stored(compressed, torch.randn(len(every), HEAD), every)
    q = torch.randn(3, 2, HEAD).bfloat16()
    window_slots = torch.tensor([[3, 9, 1], [9, -1, -1], [-1, -1, -1]])
    compressed_slots = torch.tensor([[20, -1], [-1, -1], [-1, -1]])
    sink = torch.tensor([0.3, -2.0])
    out = torch.full((3, 2, HEAD), float("nan")).bfloat16()
    kernels.flash_mla_with_kvcache_cpu(
        *(out, q, cache, window_slots, BLOCK),
        *(compressed, compressed_slots, BLOCK, sink, 0.05),
    )
    for t, (near, far) in enumerate(zip(window_slots, compressed_slots, strict=True)):
        visible = torch.cat((window[near[near >= 0]], dense[far[far >= 0]]))
        for h in range(2):
            want = attention(q[t, h].float(), visible, float(sink[h]), 0.05)
            assert torch.allclose(out[t, h].float(), want, atol=0.02), (t, h)


def test_attention_does_not_depend_on_where_blocks_lie(cache):
    latents = torch.randn(4, HEAD)
    q, sink = torch.randn(1, 2, HEAD).bfloat16(), torch.zeros(2)
    outs = []
    for slots in (torch.tensor([[0, 1, 2, 3]]), torch.tensor([[21, 6, 14, 9]])):
        stored(cache, latents, slots[0])
        out = torch.empty(1, 2, HEAD).bfloat16()
        nothing = slots.new_empty(1, 0)
        kernels.flash_mla_with_kvcache_cpu(
            out, q, cache, slots, BLOCK, cache, nothing, 1, sink, 0.05
        )
        outs.append(out.float())
    assert torch.allclose(*outs, atol=0.01)


@pytest.mark.parametrize("overlap", [False, True])
def test_pooling_of_compressor_states(overlap):
    ratio, halves = 4, 1 + overlap
    state = torch.randn(5, 8, 2 * halves * 128)
    slots = torch.randint(0, 40, (3, ratio * halves))
    slots[0, 0] = -1
    weight, eps = torch.rand(128), 1e-6
    got = kernels._compressed(state, slots, ratio, weight, eps)
    for t in range(3):
        for channel in (0, 77):
            seen = []
            for w, slot in enumerate(slots[t].tolist()):
                if slot >= 0:
                    row = state[slot // 8, slot % 8]
                    at = channel + (128 if w >= ratio else 0)
                    seen.append((float(row[at]), float(row[halves * 128 + at])))
            total = sum(math.exp(score) for _, score in seen)
            pooled = sum(math.exp(score) * value for value, score in seen) / total
            scaled = got[t, channel] / weight[channel]
            norm = pooled / float(scaled)
            assert norm == pytest.approx(
                norms(state, slots[t], ratio, halves), rel=1e-3
            )


def norms(state, slots, ratio, halves) -> float:
    """Root mean square of a whole pooled vector."""
    picked = [(w, s) for w, s in enumerate(slots.tolist()) if s >= 0]
    rows = torch.stack([state[s // 8, s % 8] for _, s in picked])
    latent, score = rows.view(len(rows), 2, halves, 128).unbind(1)
    half = [int(w >= ratio) for w, _ in picked]
    index = torch.arange(len(rows))
    weights = score[index, half].softmax(0)
    return float((weights * latent[index, half]).sum(0).square().mean().sqrt())


def test_indexer_scores_and_choice():
    pages, block, heads = 8, 64, 3
    bytes_per_page = block * (kernels.INDEX_HEAD + 4)
    cache = torch.zeros(pages, bytes_per_page, dtype=torch.uint8)
    keys = torch.randn(pages * block, kernels.INDEX_HEAD)
    values, exponents = kernels.quantize(keys, 1e-6)
    scales = exponents.exp2()
    kernels._write(
        cache,
        torch.arange(len(keys)),
        block,
        values.view(torch.uint8),
        scales.view(torch.uint8),
    )
    q = torch.randn(4, heads, kernels.INDEX_HEAD).to(kernels.FP8)
    weight = torch.rand(4, heads)
    table = torch.tensor([[3, 1], [3, 1], [6, 0], [6, 0]])
    lengths = torch.tensor([70, 128, 1, 0])
    logits = kernels.fp8_paged_mqa_logits_cpu(
        q, cache, weight, lengths, table, block, 128
    )
    for row, place in ((0, 0), (0, 69), (1, 127), (2, 0)):
        slot = int(table[row, place // block]) * block + place % block
        key = values[slot].float() * scales[slot]
        want = float(((q[row].float() @ key).relu() * weight[row]).sum())
        assert float(logits[row, place]) == pytest.approx(want, rel=1e-4, abs=1e-4)
    physical = torch.empty(4, 512, dtype=torch.int32)
    raw = torch.empty(4, 512, dtype=torch.int32)
    kernels.topk_transform_512_cpu(logits, lengths, table, physical, block, raw)
    for row, length in enumerate(lengths.tolist()):
        chosen = raw[row][raw[row] >= 0].tolist()
        assert sorted(chosen) == list(range(length))
        assert physical[row, len(chosen) :].eq(-1).all()
        for place, slot in zip(chosen, physical[row].tolist(), strict=False):
            assert slot == int(table[row, place // block]) * block + place % block


def test_choice_takes_the_best_and_breaks_ties_by_place():
    scores = torch.zeros(1, 700)
    scores[0, 600:] = 1.0
    lengths, table = torch.tensor([700]), torch.arange(11).unsqueeze(0)
    out = torch.empty(1, 512, dtype=torch.int32)
    kernels.topk_transform_512_cpu(scores, lengths, table, out, 64, None)
    assert sorted(out[0].tolist()) == [*range(412), *range(600, 700)]


def test_experts_are_chosen_with_the_bias_and_weighted_without():
    logits, bias = torch.randn(5, 16), torch.zeros(16)
    bias[3] = 100.0
    weights, chosen = kernels.biased_topk_cpu(
        logits, logits, bias, 4, True, "sqrtsoftplus", 0, 1.5, True
    )
    assert chosen[:, 0].eq(3).all()
    scores = torch.log1p(logits.exp()).sqrt()
    picked = scores.gather(1, chosen.long())
    assert torch.allclose(weights, 1.5 * picked / picked.sum(-1, keepdim=True))


def test_define_missing_keeps_what_vllm_has(monkeypatch):
    """Defined once; a second call, and an operator that is there, change nothing."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    kernels.define_missing()
    for function in kernels.OPERATORS:
        assert hasattr(torch.ops._C, function.__name__)
    assert kernels.define_missing() == []
