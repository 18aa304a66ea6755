"""Draw one token per row of logits, with the log-probability under which it was drawn.

In torch this is a softmax, a cumulative sum in FP64 and a search: five passes over [N, V], some in eight bytes a number
and, if the distribution is truncated, a sort of each row as well. Here a row is read about once.

    pass 1   program (row, chunk of 4096 logits):  peak and mass = sum exp(z - peak)     -> [N, chunks]
    pass 2   program (row):  weight = mass exp(peak - top) in FP64; the uniform number picks the chunk by the cumulative
             weights, then the token by the cumulative sum, in FP64, of this one chunk. log-prob = z - top - log(total)

Randomness is counter-based: one number per (seed, prompt uid, sample, position) by a hash, bit-equal to the reference.
A row's result depends on nothing but its logits and its counters, not on N and not on the order in which programs run.

Truncation keeps the logits >= one threshold per row, which is found first (truncation.py).

Bytes moved: N V logits, and one more chunk per row; truncation comes on top.

What was left out: Gumbel noise, which needs a hash per logit and no second pass; it would draw other tokens than the
reference does from the same counters. Penalties: the trainer would have to replay them.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_kernels.truncation import thresholds, truncates, truncation_threshold

_CHUNK = 4096


@triton.jit
def _mix(h):
    """The finaliser of SplitMix64 on int64 (wrapping); `>>` is arithmetic, so the sign bits are masked off.

    Plain arithmetic, so `_mix.fn` is the same function for torch.
    """
    h = (h ^ ((h >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    h = (h ^ ((h >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return h ^ ((h >> 31) & 0x1FFFFFFFF)


@triton.jit
def _absorb(h, counter):
    return _mix(h ^ _mix(counter + 0x1E3779B97F4A7C15))


@triton.jit
def _uniform(SEED, UID, SAMPLE, POSITION, row_1):
    """FP64 [1] in [0, 1)."""
    h = _mix((tl.load(SEED + row_1 * 0) + 0x632BE5AB) & 0x3FFFFFFFFFFFFFFF)
    h = _absorb(_absorb(_absorb(h, tl.load(UID + row_1)), tl.load(SAMPLE + row_1)), tl.load(POSITION + row_1))
    return ((h >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16  # 2**-53


@triton.jit
def _tempered(LOGITS, LEAST, row, i, V, inverse_temperature, TRUNCATED: tl.constexpr):
    """FP32 logits `i` of a row over the temperature, -inf where cut or beyond the end. A NaN is never cut."""
    x = tl.load(LOGITS + row.to(tl.int64) * V + i, mask=i < V, other=-float("inf")).to(tl.float32)
    if TRUNCATED:
        x = tl.where(x < tl.load(LEAST + row), -float("inf"), x)
    return x * inverse_temperature


@triton.jit
def _chunk_kernel(
    LOGITS,
    LEAST,
    PEAK,
    MASS,
    PLACE,
    V,
    inverse_temperature,
    CHUNK: tl.constexpr,
    TRUNCATED: tl.constexpr,
    GREEDY: tl.constexpr,
):
    """Pass 1. PLACE, for greedy rows: the lowest id with the chunk's peak."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    z = _tempered(LOGITS, LEAST, row, i, V, inverse_temperature, TRUNCATED)
    peak = tl.max(z, 0)
    mass = tl.sum(tl.exp(z - tl.where(peak == -float("inf"), 0.0, peak)), 0)
    out = row * tl.num_programs(1) + chunk
    tl.store(PEAK + out, peak)
    tl.store(MASS + out, mass)
    if GREEDY:
        tl.store(PLACE + out, tl.min(tl.where((z == peak) & (i < V), i, V - 1), 0))


@triton.jit
def _draw_kernel(
    LOGITS,
    LEAST,
    PEAK,
    MASS,
    PLACE,
    SEED,
    UID,
    SAMPLE,
    POSITION,
    TOKEN,
    LOGPROB,
    V,
    inverse_temperature,
    chunks,
    C: tl.constexpr,
    CHUNK: tl.constexpr,
    TRUNCATED: tl.constexpr,
    GREEDY: tl.constexpr,
):
    """Pass 2; C is the number of chunks, padded. Tokens without weight are never drawn, whatever rounding does."""
    row = tl.program_id(0)
    c = tl.arange(0, C)
    peak_C = tl.load(PEAK + row * chunks + c, mask=c < chunks, other=-float("inf"))
    mass_C = tl.load(MASS + row * chunks + c, mask=c < chunks, other=0.0).to(tl.float64)
    top = tl.max(peak_C, 0)
    weight_C = mass_C * tl.exp((peak_C - top).to(tl.float64))
    total = tl.sum(weight_C, 0)
    if GREEDY:
        place_C = tl.load(PLACE + row * chunks + c, mask=c < chunks, other=0)
        token = tl.min(tl.where((peak_C == top) & (c < chunks), place_C, V - 1), 0)
        logprob = -tl.log(total)
    else:
        row_1 = row + tl.arange(0, 1)
        target = tl.sum(_uniform(SEED, UID, SAMPLE, POSITION, row_1), 0) * total
        chunk = tl.sum((tl.cumsum(weight_C, 0) <= target).to(tl.int32), 0)
        chunk = tl.minimum(chunk, tl.max(tl.where(weight_C > 0, c, 0), 0))
        before = tl.sum(tl.where(c < chunk, weight_C, 0.0), 0)
        peak = tl.sum(tl.where(c == chunk, peak_C, 0.0), 0)
        rest = tl.maximum(target - before, 0.0) / tl.exp((peak - top).to(tl.float64))

        i = tl.arange(0, CHUNK)
        z = _tempered(LOGITS, LEAST, row, chunk * CHUNK + i, V, inverse_temperature, TRUNCATED)
        p = tl.exp(z - peak)  # as in pass 1
        place = tl.sum((tl.cumsum(p.to(tl.float64), 0) <= rest).to(tl.int32), 0)
        place = tl.minimum(place, tl.max(tl.where(p > 0, i, 0), 0))
        token = chunk * CHUNK + place
        logprob = (tl.sum(tl.where(i == place, z, 0.0), 0) - top).to(tl.float64) - tl.log(total)
    tl.store(TOKEN + row, token.to(tl.int64))
    tl.store(LOGPROB + row, logprob.to(tl.float32))


def counter_uniform(seed: Tensor, *counters: Tensor) -> Tensor:
    """FP64 [N] in [0, 1) from a seed, int64 [1], and int64 counters [N]; equal counters always give equal numbers."""
    h = _mix.fn((seed + 0x632BE5AB) & (2**62 - 1)).expand_as(counters[0])
    for counter in counters:
        h = _mix.fn(h ^ _mix.fn(counter + 0x1E3779B97F4A7C15))
    return ((h >> 11) & 0x1FFFFFFFFFFFFF).double() * 2.0**-53


def sample_tokens_reference(
    logits: Tensor,
    uid: Tensor,
    sample: Tensor,
    position: Tensor,
    seed: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> tuple[Tensor, Tensor]:
    """`sample_tokens` in torch: the inverse of the cumulative distribution, summed in FP64, at a hashed number."""
    logits = logits.float()
    vocabulary = logits.shape[-1]
    if temperature == 0:
        logprobs = logits.log_softmax(-1)
        best = logits == logits.amax(-1, keepdim=True)
        ids = torch.arange(vocabulary, device=logits.device)
        token_ids = torch.where(best, ids, vocabulary - 1).amin(-1)  # the lowest on every device
    else:
        if truncates(vocabulary, top_k, top_p, min_p):
            cut = logits < truncation_threshold(logits, temperature, top_k, top_p, min_p)
            logits = logits.masked_fill(cut, -math.inf)
        logprobs = (logits / temperature).log_softmax(-1)
        cumulative = logprobs.double().exp().cumsum(-1)
        target = counter_uniform(seed, uid, sample, position) * cumulative[:, -1]
        token_ids = torch.searchsorted(cumulative, target.unsqueeze(-1), right=True).squeeze(-1)
        token_ids = token_ids.clamp_max(vocabulary - 1)
    return token_ids, logprobs.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)


def sample_tokens_triton(
    logits: Tensor,
    uid: Tensor,
    sample: Tensor,
    position: Tensor,
    seed: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> tuple[Tensor, Tensor]:
    """`sample_tokens` by two kernels, three with truncation."""
    logits = logits.contiguous()
    rows, vocabulary = logits.shape
    greedy = temperature == 0
    truncated = not greedy and truncates(vocabulary, top_k, top_p, min_p)
    chunks = triton.cdiv(vocabulary, _CHUNK)
    peak, mass = logits.new_empty(2, rows, chunks, dtype=torch.float32).unbind()
    place = logits.new_empty(rows, chunks, dtype=torch.int32) if greedy else None
    least = thresholds(logits, temperature, top_k, top_p, min_p) if truncated else None
    inverse = 1.0 if greedy else 1.0 / temperature
    switches = {"CHUNK": _CHUNK, "TRUNCATED": truncated, "GREEDY": greedy}
    _chunk_kernel[(rows, chunks)](logits, least, peak, mass, place, vocabulary, inverse, **switches)

    token_ids = logits.new_empty(rows, dtype=torch.int64)
    logprobs = logits.new_empty(rows, dtype=torch.float32)
    counters = (seed, uid, sample, position)
    _draw_kernel[(rows,)](
        logits,
        least,
        peak,
        mass,
        place,
        *counters,
        token_ids,
        logprobs,
        vocabulary,
        inverse,
        chunks,
        C=triton.next_power_of_2(chunks),
        num_warps=8,
        **switches,
    )
    return token_ids, logprobs


_SAMPLE = torch.library.custom_op(
    "trace_kernels::sample_tokens",
    sample_tokens_triton,
    mutates_args=(),
    device_types="cuda",
    schema="(Tensor logits, Tensor uid, Tensor sample, Tensor position, Tensor seed, float temperature, int top_k, "
    "float top_p, float min_p) -> (Tensor, Tensor)",
)
_SAMPLE.register_kernel("cpu", sample_tokens_reference)


@_SAMPLE.register_fake
def _(
    logits: Tensor,
    uid: Tensor,
    sample: Tensor,
    position: Tensor,
    seed: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> tuple[Tensor, Tensor]:
    rows = logits.shape[0]
    return logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows, dtype=torch.float32)


def sample_tokens(
    logits_NV: Tensor,
    uid_N: Tensor,
    sample_N: Tensor,
    position_N: Tensor,
    seed: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = -1,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    A row with a NaN, or without a finite maximum, yields the log-prob NaN and some token of the vocabulary.

    Args:
        logits_NV: FP32, BF16 or FP16 [N, V], before the temperature.
        uid_N: int64, the prompt's uid.
        sample_N: int64, the number of the sample.
        position_N: int64, the position of the drawn token.
        seed: int64 [1], on the device, so that a captured graph follows it.
        temperature: divides the logits; 0 takes the most likely token, the lowest id of equals, and ignores the rest.
        top_k: keep the k most likely tokens; -1 keeps all.
        top_p: keep the smallest set of tokens with this mass.
        min_p: keep tokens at least this likely relative to the most likely one.

    Returns:
        token ids int64 [N] and FP32 log-probs [N] under the distribution drawn from (truncated and renormalised).

    Raises:
        ValueError: if the counters or the seed are not int64 of these shapes.
    """
    for name, tensor, length in (
        ("uid_N", uid_N, logits_NV.shape[0]),
        ("sample_N", sample_N, logits_NV.shape[0]),
        ("position_N", position_N, logits_NV.shape[0]),
        ("seed", seed, 1),
    ):
        if tensor.dtype != torch.int64 or tuple(tensor.shape) != (length,):
            raise ValueError(f"`{name}` must be int64 [{length}], found {tensor.dtype} {tuple(tensor.shape)}")
    return _SAMPLE(logits_NV, uid_N, sample_N, position_N, seed, temperature, top_k, top_p, min_p)
