"""q, k and v of the 1.7B shape with adapters of rank 32, 64 rows."""

from __future__ import annotations

from compile_gate import Case
from triton.language import bfloat16

from trace_kernels.low_rank import _expand_kernel

TYPES = {"PARTS": "*fp32", "HIDDEN": "*bf16", "B": "*bf16", "OUT": "*bf16"} | dict.fromkeys(("M", "N", "R"), "i32")

CASES = [
    Case(
        name="low-rank-expand",
        kernel=_expand_kernel,
        signature=TYPES | {"stride_S": "i32"},
        constexprs={"S": 4, "DTYPE": bfloat16, "BM": 32, "BN": 64, "BR": 32},
    ),
]
