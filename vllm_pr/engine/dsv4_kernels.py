# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4's CPU operators in eager PyTorch, for processors without AMX.

vLLM compiles these operators only into its AVX-512/AMX library. ``define_missing``
adds those that are absent to ``torch.ops._C``, so that the real model class runs on any
x86 processor; where vLLM has its own, that one stays. Each keeps the operator's
contract: shapes, in-place outputs and the bytes of a cache block, so two processors
differ in rounding only.

A cache block of the main attention (``fp8_ds_mla``) holds, for each token, 448 FP8
values and 64 bfloat16 values, then for each token 7 scale exponents and a pad byte. A
block of the indexer holds 128 FP8 values for each token, then one float32 scale each.
"""

import torch
from torch import Tensor

NOPE, ROPE, HEAD = 448, 64, 512
TILE = 64
TOKEN_BYTES = NOPE + 2 * ROPE
SCALE_BYTES = NOPE // TILE + 1
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
EXPONENT_BIAS = 127
SMALLEST_SCALE = 1e-4
INDEX_HEAD = 128
INDEX_TOPK = 512


def rotate(x: Tensor, positions: Tensor, cos_sin: Tensor, inverse: bool) -> Tensor:
    """Rotate the interleaved pairs of the last dimension of ``x`` (tokens first)."""
    cos, sin = cos_sin[positions].float().chunk(2, dim=-1)
    shape = (len(positions), *[1] * (x.dim() - 2), cos.shape[-1])
    turn = torch.complex(cos, -sin if inverse else sin).view(shape)
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn).flatten(-2)


def rotate_tail(x: Tensor, positions: Tensor, cos_sin: Tensor, inverse=False) -> Tensor:
    """Rotate the last ``ROPE`` values of each head, keep the others; float32."""
    head = x[..., :-ROPE].float()
    return torch.cat((head, rotate(x[..., -ROPE:], positions, cos_sin, inverse)), -1)


def quantize(x: Tensor, smallest: float) -> tuple[Tensor, Tensor]:
    """FP8 values of ``x`` and the exponent of their power-of-two scale (last dim 1)."""
    largest = x.abs().amax(-1, keepdim=True)
    exponent = (largest / FP8_MAX).clamp(min=smallest).log2().ceil()
    return (x * (-exponent).exp2()).clamp(-FP8_MAX, FP8_MAX).to(FP8), exponent


def _columns(start: Tensor, width: int) -> Tensor:
    return start.unsqueeze(-1) + torch.arange(width)


def _write(cache: Tensor, slots: Tensor, block_size: int, data: Tensor, scales: Tensor):
    """Write one token a row: ``data`` and ``scales`` are uint8, ``cache`` is 2-D."""
    block, offset = (slots // block_size).unsqueeze(-1), slots % block_size
    width, scale_width = data.shape[-1], scales.shape[-1]
    cache[block, _columns(offset * width, width)] = data
    at = block_size * width + offset * scale_width
    cache[block, _columns(at, scale_width)] = scales


def _write_latent(cache: Tensor, slots: Tensor, block_size: int, x: Tensor) -> None:
    """Write latent vectors, already rotated, float32, one a token."""
    stored = slots >= 0
    x, slots = x[stored].bfloat16(), slots[stored]
    tiles = x[:, :NOPE].float().unflatten(-1, (-1, TILE))
    values, exponents = quantize(tiles, SMALLEST_SCALE)
    rope = x[:, NOPE:].contiguous().view(torch.uint8)
    data = torch.cat((values.flatten(1).view(torch.uint8), rope), -1)
    scales = torch.zeros(len(x), SCALE_BYTES, dtype=torch.uint8)
    scales[:, :-1] = (exponents.squeeze(-1) + EXPONENT_BIAS).to(torch.uint8)
    _write(cache, slots, block_size, data, scales)


def _read_latent(cache: Tensor, slots: Tensor, block_size: int) -> Tensor:
    """Latent vectors of ``slots``, float32."""
    block, offset = (slots // block_size).unsqueeze(-1), slots % block_size
    data = cache[block, _columns(offset * TOKEN_BYTES, TOKEN_BYTES)]
    at = block_size * TOKEN_BYTES + offset * SCALE_BYTES
    scales = cache[block, _columns(at, SCALE_BYTES - 1)].float() - EXPONENT_BIAS
    nope = data[:, :NOPE].view(FP8).float().unflatten(-1, (-1, TILE))
    nope = (nope * scales.exp2().unsqueeze(-1)).flatten(1)
    rope = data[:, NOPE:].contiguous().view(torch.bfloat16).float()
    return torch.cat((nope, rope), -1)


def fused_qnorm_rope_kv_insert_cpu(
    q: Tensor,
    kv: Tensor,
    positions: Tensor,
    swa_kv_cache_2d: Tensor,
    slot_mapping: Tensor,
    cos_sin_cache: Tensor,
    q_head_padded: int,
    eps: float,
    cache_block_size: int,
) -> Tensor:
    """Normalise and rotate the queries; rotate and store the window's latents."""
    tokens = len(slot_mapping)
    latent = rotate_tail(kv[:tokens], positions[:tokens], cos_sin_cache)
    _write_latent(swa_kv_cache_2d, slot_mapping, cache_block_size, latent)
    normed = q.float() * (q.float().square().mean(-1, keepdim=True) + eps).rsqrt()
    out = q.new_zeros(q.shape[0], q_head_padded, q.shape[2])
    out[:, : q.shape[1]] = rotate_tail(normed, positions, cos_sin_cache).to(q.dtype)
    return out


def _latents(cache: Tensor, slots: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Each slot's latent once, and which rows of ``slots`` may look at which."""
    used, index = slots.clamp(min=0).unique(return_inverse=True)
    visible = torch.zeros(slots.shape[0], len(used), dtype=torch.bool)
    rows, columns = (slots >= 0).nonzero(as_tuple=True)
    visible[rows, index[rows, columns]] = True
    return _read_latent(cache, used, block_size), visible


def flash_mla_with_kvcache_cpu(
    out: Tensor,
    q: Tensor,
    window_cache_2d: Tensor,
    window_slots: Tensor,
    window_block_size: int,
    compressed_cache_2d: Tensor,
    compressed_slots: Tensor,
    compressed_block_size: int,
    attn_sink: Tensor,
    scale: float,
) -> None:
    """Attend to the window and the compressed latents; a sink takes its share."""
    latents, visible = _latents(window_cache_2d, window_slots, window_block_size)
    if compressed_slots.shape[1]:
        more = _latents(compressed_cache_2d, compressed_slots, compressed_block_size)
        latents = torch.cat((latents, more[0]))
        visible = torch.cat((visible, more[1]), -1)
    scores = (q.float() @ latents.T) * scale
    scores.masked_fill_(~visible.unsqueeze(1), float("-inf"))
    sink = attn_sink.view(1, -1, 1).expand(len(q), -1, 1)
    weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    out.copy_(weights @ latents)


def save_partial_states_cpu(
    kv: Tensor,
    score: Tensor,
    ape: Tensor,
    positions: Tensor,
    state_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Store each token's compressor state: its latent and its score."""
    stored = slot_mapping >= 0
    slots = slot_mapping[stored]
    biased = score[stored] + ape[positions[stored] % len(ape)]
    row = torch.cat((kv[stored], biased), -1)
    state_cache[slots // state_cache.shape[1], slots % state_cache.shape[1]] = row


def _compressed(
    state_cache: Tensor,
    gather_slots: Tensor,
    ratio: int,
    weight: Tensor,
    eps: float,
) -> Tensor:
    """Pool each window of states by a softmax per channel, then normalise.

    A state holds one latent and one score, or two of each where windows overlap: the
    older half of a window then counts with the first, the newer with the second.
    """
    head = len(weight)
    safe = gather_slots.clamp(min=0)
    states = state_cache[safe // state_cache.shape[1], safe % state_cache.shape[1]]
    latent, score = states.unflatten(-1, (2, -1, head)).unbind(-3)
    half = torch.arange(gather_slots.shape[1]).ge(ratio).long()
    pick = half.view(1, -1, 1, 1).expand(len(states), -1, 1, head)
    latent, score = latent.gather(2, pick).squeeze(2), score.gather(2, pick).squeeze(2)
    score = score.masked_fill((gather_slots < 0).unsqueeze(-1), float("-inf"))
    pooled = (score.softmax(1) * latent).sum(1)
    return pooled * (pooled.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def compress_norm_rope_store_cpu(
    state_cache: Tensor,
    gather_slots: Tensor,
    positions: Tensor,
    kv_slot_mapping: Tensor,
    rms_norm_weight: Tensor,
    rms_norm_eps: float,
    cos_sin_cache: Tensor,
    kv_cache_2d: Tensor,
    kv_cache_block_size: int,
    compress_ratio: int,
) -> None:
    """Compress each full window into one latent and store it."""
    due = ((positions + 1) % compress_ratio == 0) & (kv_slot_mapping >= 0)
    positions, slots = positions[due] // compress_ratio, kv_slot_mapping[due]
    states = (state_cache, gather_slots[due], compress_ratio)
    normed = _compressed(*states, rms_norm_weight, rms_norm_eps)
    latent = rotate_tail(normed, positions * compress_ratio, cos_sin_cache)
    _write_latent(kv_cache_2d, slots, kv_cache_block_size, latent)


def compress_norm_rope_store_indexer_cpu(
    state_cache: Tensor,
    gather_slots: Tensor,
    positions: Tensor,
    kv_slot_mapping: Tensor,
    rms_norm_weight: Tensor,
    rms_norm_eps: float,
    cos_sin_cache: Tensor,
    kv_cache_2d: Tensor,
    kv_cache_block_size: int,
    compress_ratio: int,
) -> None:
    """The same for the indexer's keys, which are FP8 throughout."""
    due = ((positions + 1) % compress_ratio == 0) & (kv_slot_mapping >= 0)
    positions, slots = positions[due] // compress_ratio, kv_slot_mapping[due]
    states = (state_cache, gather_slots[due], compress_ratio)
    normed = _compressed(*states, rms_norm_weight, rms_norm_eps)
    key = rotate_tail(normed, positions * compress_ratio, cos_sin_cache)
    values, exponents = quantize(key.bfloat16().float(), SMALLEST_SCALE / FP8_MAX)
    scales = exponents.exp2().view(torch.uint8)
    data = values.view(torch.uint8)
    _write(kv_cache_2d, slots, kv_cache_block_size, data, scales)


def fused_indexer_q_rope_quant_cpu(
    positions: Tensor,
    index_q: Tensor,
    index_q_cos_sin_cache: Tensor,
    index_q_fp8: Tensor,
    index_weights: Tensor,
    index_weights_softmax_scale: float,
    index_weights_head_scale: float,
    index_weights_out: Tensor,
) -> None:
    """Rotate and quantise the indexer's queries; fold their scale into the weights."""
    turned = rotate_tail(index_q, positions, index_q_cos_sin_cache)
    turned[..., -ROPE:] = turned[..., -ROPE:].bfloat16().float()
    values, exponents = quantize(turned, SMALLEST_SCALE / FP8_MAX)
    index_q_fp8.copy_(values)
    folded = index_weights_softmax_scale * index_weights_head_scale
    index_weights_out.copy_(index_weights * exponents.exp2().squeeze(-1) * folded)


def fp8_paged_mqa_logits_cpu(
    q_fp8: Tensor,
    kvcache_fp8: Tensor,
    weight: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    block_size: int,
    max_seq_len: int,
) -> Tensor:
    """Score each query against the indexer's keys of its own request."""
    logits = torch.zeros(len(q_fp8), max_seq_len)
    tables, owner = page_table.unique(dim=0, return_inverse=True)
    places = torch.arange(max_seq_len)
    for request, table in enumerate(tables):
        rows = (owner == request).nonzero().squeeze(-1)
        length = int(seq_lens[rows].max())
        here = places[:length]
        block = table[here // block_size].long().unsqueeze(-1)
        offset = here % block_size
        key = kvcache_fp8[block, _columns(offset * INDEX_HEAD, INDEX_HEAD)]
        at = block_size * INDEX_HEAD + offset * 4
        scale = kvcache_fp8[block, _columns(at, 4)].view(torch.float32).squeeze(-1)
        score = (q_fp8[rows].float() @ key.view(FP8).float().T).relu()
        score = (score * weight[rows].unsqueeze(-1)).sum(1) * scale
        logits[rows.unsqueeze(-1), here] = score
    return logits


def topk_transform_512_cpu(
    scores: Tensor,
    seq_lens: Tensor,
    page_tables: Tensor,
    out_page_indices: Tensor,
    page_size: int,
    out_raw_indices: Tensor | None,
) -> None:
    """The 512 best places of each row, -1 where a row has fewer; ties to the first."""
    width = scores.shape[1]
    ended = torch.arange(width) >= seq_lens.unsqueeze(-1)
    order = scores.masked_fill(ended, float("-inf"))
    order = order.sort(dim=-1, descending=True, stable=True).indices[:, :INDEX_TOPK]
    best = torch.full((len(scores), INDEX_TOPK), -1)
    best[:, : order.shape[1]] = order
    best[torch.arange(INDEX_TOPK) >= seq_lens.unsqueeze(-1)] = -1
    pages = page_tables.long().gather(1, best.clamp(min=0) // page_size)
    physical = pages * page_size + best.clamp(min=0) % page_size
    out_page_indices[:, :INDEX_TOPK] = physical.where(best >= 0, -1).int()
    if out_raw_indices is not None:
        out_raw_indices[:, :INDEX_TOPK] = best.int()


def biased_topk_cpu(
    hidden_states: Tensor,
    gating_output: Tensor,  # (tokens, experts)
    correction_bias: Tensor,
    topk: int,  # experts a token
    renormalize: bool,
    scoring_func: str,  # only sqrtsoftplus
    num_fused_shared_experts: int,  # only 0
    routed_scaling_factor: float | None,
    apply_routed_scaling_factor_on_output: bool,
) -> tuple[Tensor, Tensor]:
    """Choose experts by biased score; their weight is the score without the bias."""
    if scoring_func != "sqrtsoftplus" or num_fused_shared_experts:
        raise NotImplementedError(f"routing by {scoring_func} with fused experts")
    scores = torch.nn.functional.softplus(gating_output.float()).sqrt()
    chosen = (scores + correction_bias.float()).topk(topk).indices
    weights = scores.gather(1, chosen)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
        if apply_routed_scaling_factor_on_output:
            weights = weights * (routed_scaling_factor or 0.0)
    return weights, chosen.int()


def inverse_gptj_rope_o_proj_cpu(
    o: Tensor, positions: Tensor, cos_sin_cache: Tensor, rope_dim: int
) -> Tensor:
    """Turn the attention output back by its query's position; float32."""
    return rotate_tail(o, positions, cos_sin_cache, inverse=True)


def convert_weight_packed(weight: Tensor) -> Tensor:
    """No packing: ``bmm_cpu`` below takes the plain layout."""
    return weight.clone()


def bmm_cpu(
    out: Tensor, mat1: Tensor, mat2: Tensor, is_vnni: bool, scale: Tensor | None
) -> None:
    """Batched ``mat1 @ mat2.T``."""
    out.copy_(mat1.float() @ mat2.float().transpose(1, 2))


def hc_pre_fused_cpu(
    x: Tensor,
    hc_fn: Tensor,
    hc_scale: Tensor,  # (3,)
    hc_base: Tensor,
    hc_mult: int,  # residual streams
    sinkhorn_iters: int,
    rms_eps: float,
    hc_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mix the residual streams into one: vLLM's own eager reference."""
    from vllm.model_executor.kernels.mhc.torch import mhc_pre_torch

    post, comb, mixed = mhc_pre_torch(
        x, hc_fn, hc_scale, hc_base, rms_eps, hc_eps, hc_eps, 2.0, sinkhorn_iters
    )
    return mixed, post.squeeze(-1), comb


def hc_post_fused_cpu(
    x: Tensor, residual: Tensor, post: Tensor, comb: Tensor
) -> Tensor:
    """Add a layer's output to the residual streams: vLLM's own eager reference."""
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch

    return mhc_post_torch(x, residual, post.unsqueeze(-1), comb)


def hc_head_fused_cpu(
    x: Tensor,
    hc_fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    hc_eps: float,
    norm_eps: float,
) -> Tensor:
    """Gate the residual streams into the last hidden state."""
    flat = x.flatten(1).float()
    mixes = (flat @ hc_fn.T) * (flat.square().mean(-1, keepdim=True) + norm_eps).rsqrt()
    gates = torch.sigmoid(mixes * hc_scale + hc_base) + hc_eps
    return (gates.unsqueeze(-1) * x.float()).sum(1).to(x.dtype)


OPERATORS = {
    fused_qnorm_rope_kv_insert_cpu: ("swa_kv_cache_2d",),
    flash_mla_with_kvcache_cpu: ("out",),
    save_partial_states_cpu: ("state_cache",),
    compress_norm_rope_store_cpu: ("kv_cache_2d",),
    compress_norm_rope_store_indexer_cpu: ("kv_cache_2d",),
    fused_indexer_q_rope_quant_cpu: ("index_q_fp8", "index_weights_out"),
    fp8_paged_mqa_logits_cpu: (),
    topk_transform_512_cpu: ("out_page_indices", "out_raw_indices"),
    biased_topk_cpu: (),
    inverse_gptj_rope_o_proj_cpu: (),
    convert_weight_packed: (),
    bmm_cpu: ("out",),
    hc_pre_fused_cpu: (),
    hc_post_fused_cpu: (),
    hc_head_fused_cpu: (),
}
_library = torch.library.Library("_C", "FRAGMENT")


def define_missing() -> list[str]:
    """Add the operators that ``torch.ops._C`` lacks; return their names.

    Call it once vLLM has loaded its own library.
    """
    added = []
    for function, mutated in OPERATORS.items():
        name = function.__name__
        if not hasattr(torch.ops._C, name):
            schema = torch.library.infer_schema(function, mutates_args=mutated)
            _library.define(name + schema)
            _library.impl(name, function, "CPU")
            added.append(name)
    return added
