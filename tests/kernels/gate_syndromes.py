"""Encoding and decoding rows of 2,048 bits: an input of a linear of the 1.7B shape."""

from __future__ import annotations

from compile_gate import Case

from trace_kernels.syndrome_decode import EVEN, ODD, ROWS, _columns_of, _flips_kernel
from trace_kernels.syndromes import TILE, WINDOW, _encode_kernel, syndrome_bytes

CASES = [
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
        constexprs={
            **{"K": 2048, "R": ROWS, "EVEN_SETS": EVEN, "ODD_SETS": ODD},
            **{"EVEN_X": tuple(map(_columns_of, EVEN)), "ODD_X": tuple(map(_columns_of, ODD))},
        },
    ),
]
