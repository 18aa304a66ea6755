"""NVFP4 pages of 16 tokens under heads of 128, to BF16."""

from __future__ import annotations

from compile_gate import Case

from trace_kernels.page_gather import _gather_kernel

POINTERS = {"DATA": "*u8", "SCALE": "*u8", "OUTER": "*fp32", "OUT": "*bf16"}
CASES = [
    Case(
        name="page-gather",
        kernel=_gather_kernel,
        signature=POINTERS | dict.fromkeys(("TABLE", "LENGTHS", "STARTS"), "*i32") | {"table_width": "i32"},
        constexprs={"P": 16, "H": 8, "D": 128, "W": 64, "T": 32, "G": 8, "B": 16, "KIND": 2},
    )
]
