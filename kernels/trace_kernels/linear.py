"""Linear layers over FP4 weights for small batches: `y = x W^T` reading 4.5 bits per weight instead of 16.

Decoding a few sequences streams every weight once per token, so bytes are time. A Hopper GPU has no FP4 arithmetic:
codes become BF16 in registers and feed ordinary tensor cores. The budget is tight, about four machine instructions per
weight, which decides the formulation:

  * Weights are the 16-row operand of the tensor core and tokens its 8-column one: `Y^T[BN, BM] = W[BN, K] x^T[K, BM]`.
    Eight tokens then waste nothing.
  * Eight nibbles of a 32-bit word stay in the lane that loaded them. Nibble j of word w is element 8w + j, so each j is
    one product over K = {8w + j}, and the activations come permuted to match. No shuffle, no shared memory.
  * Nibbles turn into BF16 bit patterns by shifts and masks; one packed multiply applies the block scale.

    x [M, C]   ->   xp [ceil(C / 128), 8, M, 16]     xp[kb, j, m, w] = x[m, 128 kb + 8 w + j], zeros past C

                       BF16 bits             stands for                  FP16 bits             stands for
    E2M1 code s ee m   s 000000ee m000000    value * 2**-126             s 000ee m000000000    value * 2**-14
    E4M3 byte b        16 b + 0x7700         value * 2**118              128 b + 0x3800        value * 2**6
    E8M0 byte b        128 (b + 118)         value * 2**118              1024 (b - 106)        value * 2**6

The product of both is the value times 2**-8, exact (0.5 is a BF16 subnormal, which the multiply keeps); the epilogue
multiplies by 2**8 and by the outer scale. E4M3 codes must be normal, as ours are. FP16 is here because the Triton
interpreter cannot compute in BF16; MXFP4 weights below 2**-16 lose bits there.

Activations that were rounded to FP4 or FP8 are BF16 numbers like any others, since their outer scales are powers of two
too: W4A4 and W4A8 need nothing special here. NaN: a weight that is not finite makes its NVFP4 outer scale NaN or
infinite; MXFP4 scales of 2**10 and more, NaN included, become infinite. Neither can pass for a healthy number.

Work is cut over rows (BN per program) and, where those are too few to fill the GPU, over K: split s writes its own FP32
partial result and the consumer (norm, cache append, SiLU) adds them in order while it reads them anyway.

    bytes: N C 0.5625 (NVFP4) + 2 M C per row block (from L2) + 4 S M N written       BF16: 2 N C + 2 M N

What was left out: atomics or a reduction inside the kernel (results would depend on timing, or cost a launch); FP16 as
the target on a GPU (activations may exceed 65504); an offline reordering of the weights, since the stored bytes are
those that the trainer quantises in place. Above 64 tokens or so a BF16 copy of the weights is faster: see
crossover.py.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from trace_kernels.formats import unpack_codes
from trace_kernels.launch import INTERPRET, num_multiprocessors, words
from trace_kernels.quantize import Quantized, get_format
from trace_kernels.rows import permute_rows

BLOCK_SIZE = {"nvfp4": 16, "mxfp4": 32}


def supports(in_features: int, fmt: str) -> str | None:
    """Why `fp4_linear` cannot run such a layer, or None. Any width works; multiples of 128 need no masks."""
    if fmt not in BLOCK_SIZE:
        return f"fp4_linear reads {' and '.join(BLOCK_SIZE)}, not {fmt!r}"
    if in_features < 1:
        return f"in_features is {in_features}"
    return None


def permute_activations_reference(x: Tensor) -> Tensor:
    """[M, C] to [ceil(C / 128), 8, M, 16] as drawn at the top of this file."""
    return permute_rows(x)


def fp4_linear_reference(
    xp: Tensor, qdata: Tensor, scale: Tensor, outer: Tensor | None, bias: Tensor | None, *, in_features: int, fmt: str
) -> Tensor:
    """FP32 [1, M, N]: dequantised weights, FP32 matmul; arguments as for `fp4_linear`."""
    block_format = get_format(fmt)
    assert block_format is not None
    w_NC = block_format.dequantize(Quantized(unpack_codes(qdata), scale, outer, in_features))
    x_MC = xp.permute(2, 0, 3, 1).flatten(1)[:, :in_features].float()
    y = x_MC @ w_NC.T
    return (y if bias is None else y + bias.float()).unsqueeze(0)


def _unpack_assembly(kind: str, magnitude_shift: int, magnitude_mask: str) -> str:
    """PTX that turns two words ($8, $9) and their scales ($10, $11) into eight pairs of 16-bit floats ($0 ... $7)."""
    lines = [
        "{ .reg .b32 low, high, value, bits, scale;",
        "prmt.b32 scale, $10, $11, 0x5410;",
        "prmt.b32 low, $8, $9, 0x5410;",
        "prmt.b32 high, $8, $9, 0x7632;",
    ]
    for j in range(8):
        half, nibble = ("low", "high")[j // 4], j % 4
        left = magnitude_shift - 4 * nibble
        lines += [
            f"shl.b32 value, {half}, {12 - 4 * nibble};",
            f"shl.b32 bits, {half}, {left};" if left >= 0 else f"shr.u32 bits, {half}, {-left};",
            f"and.b32 bits, bits, {magnitude_mask};",
            "lop3.b32 value, value, 0x80008000, bits, 0xEA;",  # (a & b) | c
            f"mul.{kind} ${j}, value, scale;",
        ]
    return "\n".join([*lines, "}"])


_UNPACK_BF16 = tl.constexpr(_unpack_assembly("bf16x2", 6, "0x01C001C0"))
_UNPACK_FP16 = tl.constexpr(_unpack_assembly("f16x2", 9, "0x0E000E00"))
_REGISTERS = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r")


@triton.jit
def _nibble(w, scale, J: tl.constexpr):
    """What the assembly computes for nibble J, in FP16, for the interpreter."""
    code = w >> (4 * J)
    value = (((code & 8) << 12) | ((code & 7) << 9)).to(tl.int16).to(tl.float16, bitcast=True)
    return (value * scale.to(tl.int16).to(tl.float16, bitcast=True)).to(tl.int16, bitcast=True)


@triton.jit
def _unpack(w, scale, BF16: tl.constexpr, ASM: tl.constexpr):
    """Words and scale bits (uint32, same shape) to the bits (int16) of eight tensors of values times 2**-8."""
    if ASM:
        assembly: tl.constexpr = _UNPACK_BF16 if BF16 else _UNPACK_FP16
        values = tl.inline_asm_elementwise(
            assembly, _REGISTERS, [w, scale], is_pure=True, pack=2,
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16),
        )  # fmt: skip
    else:
        values = (
            _nibble(w, scale, 0), _nibble(w, scale, 1), _nibble(w, scale, 2), _nibble(w, scale, 3),
            _nibble(w, scale, 4), _nibble(w, scale, 5), _nibble(w, scale, 6), _nibble(w, scale, 7),
        )  # fmt: skip
    return values


@triton.jit
def _scale_bits(byte, BF16: tl.constexpr, MX: tl.constexpr):
    """Scale bytes (uint32) to the bits of a BF16, times 2**118, or of an FP16, times 2**6."""
    if MX:
        byte = tl.minimum(byte, 137)  # from here on infinity
        bits = (byte + 118) << 7 if BF16 else (tl.maximum(byte, 106) - 106) << 10
    else:
        bits = byte * 16 + 0x7700 if BF16 else byte * 128 + 0x3800
    return bits


@triton.jit(do_not_specialize=["M", "x_blocks", "steps", "steps_per_split"])
def _fp4_linear(
    XP, W, SCALE, OUTER, BIAS, PARTS, M, N, row_words, row_scales, x_blocks, steps, steps_per_split,
    BF16: tl.constexpr, MX: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, KW: tl.constexpr, EVEN: tl.constexpr,
    HAS_OUTER: tl.constexpr, HAS_BIAS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """PARTS[split, m, n] for BN rows n, BM tokens m and a range of steps of KW words (8 KW elements) each."""
    R: tl.constexpr = 4 if MX else 2  # words per block scale
    n0 = tl.program_id(0) * BN
    split = tl.program_id(1)
    n = tl.arange(0, BN)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    word = tl.arange(0, KW)
    block = tl.arange(0, KW // R)
    row = tl.minimum(n, N - 1 - n0)  # rows and tokens past the end repeat the last one and are not stored
    token = tl.minimum(m, M - 1)

    w_ptr = W + n0.to(tl.int64) * row_words + row[:, None] * row_words + word[None, :]
    s_ptr = SCALE + n0.to(tl.int64) * row_scales + row[:, None] * row_scales + block[None, :]
    x_ptr = XP + (word[:, None] // 16) * (128 * M) + token[None, :] * 16 + word[:, None] % 16

    y = tl.zeros((BN, BM), tl.float32)
    first = split * steps_per_split
    w_ptr += first * KW
    s_ptr += first * (KW // R)
    x_ptr += first * (KW * 8 * M)
    for step in range(first, tl.minimum(first + steps_per_split, steps)):
        if EVEN:
            w = tl.load(w_ptr)
            byte = tl.load(s_ptr)
        else:
            w = tl.load(w_ptr, mask=step * KW + word[None, :] < row_words, other=0)
            byte = tl.load(s_ptr, mask=step * (KW // R) + block[None, :] < row_scales, other=0)
        bits = _scale_bits(byte.to(tl.uint32), BF16, MX)
        bits = tl.reshape(tl.broadcast_to(bits[:, :, None], (BN, KW // R, R)), (BN, KW))
        values = _unpack(w.to(tl.uint32, bitcast=True), bits, BF16, ASM)
        for j in tl.static_range(8):
            x_at = x_ptr + j * (16 * M)
            if EVEN:
                x = tl.load(x_at)
            else:
                x = tl.load(x_at, mask=step * (KW // 16) + word[:, None] // 16 < x_blocks, other=0.0)
            y = tl.dot(values[j].to(x.dtype, bitcast=True), x, y)
        w_ptr += KW
        s_ptr += KW // R
        x_ptr += KW * 8 * M

    y *= 256.0
    if HAS_OUTER:
        y *= tl.load(OUTER)
    if HAS_BIAS:
        bias = tl.load(BIAS + n0 + row).to(tl.float32)
        y += tl.where(split == 0, bias, 0.0)[:, None]
    p_ptr = PARTS + (split.to(tl.int64) * M + m[None, :]) * N + n0 + n[:, None]
    tl.store(p_ptr, y, mask=(m[None, :] < M) & (n0 + n[:, None] < N))


@triton.jit(do_not_specialize=["M"])
def _permute_activations(X, XP, M, C, BM: tl.constexpr):
    """One program: 128 columns of BM tokens, read in order, written with the eight nibble positions outermost."""
    kb = tl.program_id(0)
    m = (tl.program_id(1) * BM + tl.arange(0, BM))[:, None, None]
    word = tl.arange(0, 16)[None, :, None]
    j = tl.arange(0, 8)[None, None, :]
    column = kb * 128 + word * 8 + j
    x = tl.load(X + m.to(tl.int64) * C + column, mask=(m < M) & (column < C), other=0.0)
    token = tl.reshape(m, (1, BM, 1))
    row = (kb * 8 + tl.arange(0, 8)[:, None, None]) * M + token
    tl.store(XP + row * 16 + tl.reshape(word, (1, 1, 16)), tl.permute(x, (2, 0, 1)), mask=token < M)


@dataclass(frozen=True)
class Tile:
    """How one program works; `programs` is how many per multiprocessor the split over K aims at."""

    rows: int
    words: int
    warps: int
    stages: int
    programs: int


# Tokens per tile -> the tile for many rows and the one for few (under two programs per multiprocessor of the first).
# From measurements on an H200 against cuBLAS; `bench_linear.py --sweep` times the candidates.
TILES = {
    8: (Tile(64, 16, 2, 3, 5), Tile(32, 16, 1, 2, 15)),
    16: (Tile(64, 16, 2, 3, 5), Tile(32, 16, 1, 2, 15)),
    32: (Tile(64, 16, 2, 3, 5), Tile(32, 16, 1, 2, 15)),
    64: (Tile(128, 16, 4, 3, 2), Tile(128, 16, 4, 3, 2)),
}


@functools.cache
def tile_tokens(tokens: int, device: torch.device) -> int:
    """Columns of the tile for a batch: 8, 16, 32 or 64; more tokens become a third grid dimension.

    The tile of 64 is for Hopper's warp-group instructions. On Blackwell `tl.dot` would become `tcgen05` there, for
    which Triton 3.6 emits code that traps.
    """
    hopper = device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9
    return min(64 if hopper else 32, max(8, triton.next_power_of_2(tokens)))


@functools.cache
def launch_plan(tokens: int, rows: int, in_features: int, device: torch.device) -> tuple[Tile, int]:
    """The tile for a layer of `rows` x `in_features`, and the number of splits over K.

    Enough splits to keep every multiprocessor busy, but at least two steps each, and no more than leave the partial
    results at about half the bytes of the weights.
    """
    columns, multiprocessors = tile_tokens(tokens, device), num_multiprocessors(device)
    wide, narrow = TILES[columns]
    tile = wide if rows >= 2 * multiprocessors * wide.rows else narrow
    steps = triton.cdiv(in_features, 8 * tile.words)
    blocks = triton.cdiv(rows, tile.rows) * triton.cdiv(tokens, columns)
    wanted = triton.cdiv(tile.programs * multiprocessors, blocks)
    splits = max(1, min(wanted, steps // 2, in_features // (28 * columns)))
    return tile, triton.cdiv(steps, triton.cdiv(steps, splits))


def launch(
    tile: Tile, splits: int, xp: Tensor, qdata: Tensor, scale: Tensor, outer: Tensor | None, bias: Tensor | None,
    *, in_features: int, fmt: str,
) -> Tensor:  # fmt: skip
    """Run the kernel with a given tile and number of splits; parts FP32 [splits, M, N]."""
    x_blocks, _, tokens, _ = xp.shape
    rows = qdata.shape[0]
    columns = tile_tokens(tokens, xp.device)
    steps = triton.cdiv(in_features, 8 * tile.words)
    parts = torch.empty(splits, tokens, rows, dtype=torch.float32, device=xp.device)
    grid = (triton.cdiv(rows, tile.rows), splits, triton.cdiv(tokens, columns))
    _fp4_linear[grid](
        xp, words(qdata), scale, outer, bias, parts, tokens, rows, qdata.shape[1] // 4, scale.shape[1], x_blocks,
        steps, triton.cdiv(steps, splits),
        BF16=xp.dtype == torch.bfloat16, MX=fmt == "mxfp4",
        BN=tile.rows, BM=columns, KW=tile.words, EVEN=in_features % (8 * tile.words) == 0,
        HAS_OUTER=outer is not None, HAS_BIAS=bias is not None, ASM=not INTERPRET,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return parts


def fp4_linear_triton(
    xp: Tensor, qdata: Tensor, scale: Tensor, outer: Tensor | None, bias: Tensor | None, *, in_features: int, fmt: str
) -> Tensor:
    """Launch with the tile and splits of `launch_plan`; arguments as for `fp4_linear`."""
    tile, splits = launch_plan(xp.shape[2], qdata.shape[0], in_features, xp.device)
    return launch(tile, splits, xp, qdata, scale, outer, bias, in_features=in_features, fmt=fmt)


def permute_activations_triton(x: Tensor) -> Tensor:
    """Launcher; arguments as for `permute_activations`."""
    tokens, width = x.shape
    xp = torch.empty(triton.cdiv(width, 128), 8, tokens, 16, dtype=x.dtype, device=x.device)
    _permute_activations[(xp.shape[0], triton.cdiv(tokens, 8))](x.contiguous(), xp, tokens, width, BM=8, num_warps=1)
    return xp


def _fake_permute_activations(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[1] + 127) // 128, 8, x.shape[0], 16)


def _fake_fp4_linear(
    xp: Tensor, qdata: Tensor, scale: Tensor, outer: Tensor | None, bias: Tensor | None, *, in_features: int, fmt: str
) -> Tensor:
    tokens, rows = xp.shape[2], qdata.shape[0]
    on_gpu = xp.device.type == "cuda"
    splits = launch_plan(int(tokens), rows, in_features, xp.device)[1] if on_gpu else 1
    return xp.new_empty(splits, tokens, rows, dtype=torch.float32)


_permute_op = torch.library.custom_op(
    "trace_kernels::permute_activations", permute_activations_reference, mutates_args=(), device_types="cpu"
)
_permute_op.register_kernel("cuda")(permute_activations_triton)
_permute_op.register_fake(_fake_permute_activations)

_linear_op = torch.library.custom_op(
    "trace_kernels::fp4_linear", fp4_linear_reference, mutates_args=(), device_types="cpu"
)
_linear_op.register_kernel("cuda")(fp4_linear_triton)
_linear_op.register_fake(_fake_fp4_linear)


def permute_activations(x: Tensor) -> Tensor:
    """Activations [M, C] as `fp4_linear` reads them, [ceil(C / 128), 8, M, 16], same dtype.

    A fallback: the norm and SiLU kernels write this order themselves.
    """
    return _permute_op(x)


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], in_features: int, fmt: str) -> None:
    if tuple(tensor.shape) != shape:
        needed = f"{fmt} with in_features={in_features} needs {shape}"
        raise ValueError(f"{name} is {tuple(tensor.shape)}, but {needed}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous")


def fp4_linear(
    xp: Tensor, qdata: Tensor, scale: Tensor, outer: Tensor | None, bias: Tensor | None, *, in_features: int, fmt: str
) -> Tensor:
    """`x W^T + bias` over FP4 weights, as FP32 partial results that the consumer adds up and rounds once.

    Args:
        xp: activations from `permute_activations`, [ceil(C / 128), 8, M, 16], BF16 (or FP16; FP32 on a CPU).
        qdata: packed codes, uint8 [N, Cp / 2], contiguous; Cp is C rounded up to whole blocks.
        scale: block scale bytes, uint8 [N, Cp / block]; E4M3 without subnormals, or E8M0.
        outer: FP32 [1, 1], a power of two; None for MXFP4.
        bias: [N] or None; added in split 0.
        in_features: C.
        fmt: "nvfp4" or "mxfp4".

    Returns:
        FP32 [S, M, N], whose sum over S is the result. S depends on the shapes and the device alone, and a token's
        values do not depend on the other tokens.

    Raises:
        ValueError: for shapes or a format that do not fit together.
    """
    if reason := supports(in_features, fmt):
        raise ValueError(reason)
    block = BLOCK_SIZE[fmt]
    padded = -(-in_features // block) * block
    rows = qdata.shape[0]
    _check("xp", xp, (-(-in_features // 128), 8, xp.shape[2], 16), in_features, fmt)
    _check("qdata", qdata, (rows, padded // 2), in_features, fmt)
    _check("scale", scale, (rows, padded // block), in_features, fmt)
    if xp.device.type == "cuda" and xp.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"xp is {xp.dtype}; on a GPU it must be bfloat16 or float16")
    return _linear_op(xp, qdata, scale, outer, bias, in_features=in_features, fmt=fmt)
