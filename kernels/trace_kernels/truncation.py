"""The least logit of each row that top-k, top-p and min-p keep: truncated sampling draws from the logits >= it.

In torch this takes a sort of each row. Here one program per row builds the 32 bits of a float from the top: a bit stays
if the tokens at or above the number still count k, or weigh p. Floats are compared as integers in their order. BF16 has
16 bits to find.

The order is vLLM's: top-k, then top-p over what is left, then min-p. Tokens that tie with the last one kept are kept.

Bytes moved: each row is read 16 to 64 times, mostly from the L2 cache.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROW_BLOCK = 8192


def truncates(vocabulary: int, top_k: int, top_p: float, min_p: float) -> bool:
    """Whether these cut any token of a vocabulary."""
    return 0 < top_k < vocabulary or top_p < 1 or min_p > 0


def truncation_threshold(logits_NV: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The least logit kept per row, FP32 [N, 1], before the temperature: top-k, then top-p, then min-p, with ties."""
    ordered = logits_NV.float().sort(dim=-1, descending=True).values
    peak, vocabulary = ordered[:, :1], ordered.shape[-1]
    least = ordered[:, top_k - 1 : top_k] if 0 < top_k < vocabulary else ordered[:, -1:]
    if top_p < 1:
        kept = ordered.masked_fill(ordered < least, -math.inf)  # those that tie with the last of the k stay
        probs = (kept / temperature).double().softmax(-1)
        last = (probs.cumsum(-1) - probs < top_p).sum(-1, keepdim=True).clamp_min(1) - 1  # it crosses top_p, and stays
        least = torch.maximum(least, ordered.gather(-1, last))
    return torch.maximum(least, peak + temperature * math.log(min_p)) if min_p > 0 else least


@triton.jit
def _order_key(bits):
    """int32 ordered like the FP32 numbers with these bits; the map is its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _tokens_above(logits, key, peak, inverse_temperature, V: tl.constexpr, BLOCK: tl.constexpr, MASS: tl.constexpr):
    """How many tokens have an order key >= `key`, or what they weigh (relative to the most likely one)."""
    total = tl.zeros((BLOCK,), tl.float32 if MASS else tl.int32)
    for start in range(0, V, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.load(logits + i, mask=i < V, other=-float("inf")).to(tl.float32)
        above = (_order_key(x.to(tl.int32, bitcast=True)) >= key) & (i < V)
        if MASS:
            total += tl.where(above, tl.exp((x - peak) * inverse_temperature), 0.0)
        else:
            total += above.to(tl.int32)
    return tl.sum(total, 0)


@triton.jit
def _largest_key(
    logits,
    amount,
    peak,
    inverse_temperature,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    MASS: tl.constexpr,
):
    """The largest order key such that the tokens from it on count or weigh at least `amount`."""
    key = tl.full((), -0x80000000, tl.int32)
    for i in range(BITS):
        candidate = key ^ (tl.full((), 1, tl.int32) << (31 - i))
        enough = _tokens_above(logits, candidate, peak, inverse_temperature, V, BLOCK, MASS) >= amount
        key = tl.where(enough, candidate, key)
    return key


@triton.jit
def _threshold_kernel(
    LOGITS,
    LEAST,
    inverse_temperature,
    top_k,
    top_p,
    min_p_gap,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
):
    """LEAST [N]: the least logit that is kept. `min_p_gap` is temperature * log(min_p), or -inf."""
    row = tl.program_id(0)
    logits = LOGITS + row.to(tl.int64) * V
    peaks = tl.full((BLOCK,), -float("inf"), tl.float32)
    for start in range(0, V, BLOCK):
        i = start + tl.arange(0, BLOCK)
        peaks = tl.maximum(peaks, tl.load(logits + i, mask=i < V, other=-float("inf")).to(tl.float32))
    peak = tl.max(peaks, 0)
    key = tl.full((), -0x80000000, tl.int32)
    if HAS_TOP_K:
        key = _largest_key(logits, top_k, peak, inverse_temperature, V, BLOCK, BITS, False)
    if HAS_TOP_P:
        mass = top_p * _tokens_above(logits, key, peak, inverse_temperature, V, BLOCK, True)
        key = _largest_key(logits, mass, peak, inverse_temperature, V, BLOCK, BITS, True)
    least = peak + min_p_gap
    if HAS_TOP_K or HAS_TOP_P:
        least = tl.maximum(least, _order_key(key).to(tl.float32, bitcast=True))
    tl.store(LEAST + row, least)


def thresholds(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """`truncation_threshold` by a kernel, FP32 [N]."""
    rows, vocabulary = logits.shape
    least = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _threshold_kernel[(rows,)](
        logits,
        least,
        1.0 / temperature,
        top_k,
        top_p,
        temperature * math.log(min_p) if min_p > 0 else -math.inf,
        V=vocabulary,
        BLOCK=min(_ROW_BLOCK, triton.next_power_of_2(vocabulary)),
        BITS=16 if logits.dtype == torch.bfloat16 else 32,
        HAS_TOP_K=0 < top_k < vocabulary,
        HAS_TOP_P=top_p < 1,
        num_warps=16,
    )
    return least
