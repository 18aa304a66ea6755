"""Encoding and decoding rows of 2,048 bits: an input of a linear of the 1.7B shape."""

from __future__ import annotations

from compile_gate import Case

from trace_kernels.cheapest_flips import ROWS, _flips_kernel
from trace_kernels.syndrome_decode import _flip_bits_kernel, _own_bits_kernel
from trace_kernels.syndromes import COLUMNS, TILE, WINDOW, _encode_kernel, syndrome_bytes

OWN = {
    **{"X": "*bf16", "ROW": "*i64", "SCALE": "*u8", "OUTER": "*fp32", "BITS": "*u8", "COST": "*fp32"},
    **{"stride_scale": "i32", "stride_outer": "i32"},
}

CASES = [
    Case(
        name="syndrome-own-bits",
        kernel=_own_bits_kernel,
        signature=OWN,
        constexprs={"D": 2048, "HEADS": 1, "B": 16, "G": 128, "SCALE_BITS": False, "OUTER_PER_HEAD": False},
    ),
    Case(
        name="syndrome-own-bits-kv",
        kernel=_own_bits_kernel,
        signature=OWN,
        constexprs={"D": 128, "HEADS": 8, "B": 16, "G": 64, "SCALE_BITS": True, "OUTER_PER_HEAD": True},
    ),
    Case(
        name="syndrome-flip-bits",
        kernel=_flip_bits_kernel,
        signature={"BITS": "*u8", "FLIPS": "*u8"},
        constexprs={"P": 683, "BYTES": 256, "T": 128},
    ),
    Case(
        name="syndrome-encode",
        kernel=_encode_kernel,
        signature={"BITS": "*u8", "OUT": "*u8", "stride_bits": "i32", "stride_out": "i32"},
        constexprs={"width": 2048, "BYTES": syndrome_bytes(2048), "MASK": WINDOW, "T": TILE},
    ),
    Case(
        name="syndrome-flips",
        kernel=_flips_kernel,
        signature={
            **{"COST": "*fp32", "TARGET": "*u8", "FLIPS": "*u8", "DECISIONS": "*i32"},
            **{"rows": "i32", "target_bytes": "i32"},
        },
        constexprs={"K": 2048, "R": ROWS, "X": COLUMNS, "ASM": True},
        options={"num_warps": 1},
        elements=3 * ROWS,
        max_instructions={90: 330, 100: 330, 120: 330},  # 314; 620 where LLVM packs the decisions
    ),
]
