"""Weights of a hidden size of 4096, to BF16."""

from __future__ import annotations

from compile_gate import Case

from trace_kernels.block_dequantize import _dequantize_kernel

TYPES = {"QDATA": "*u8", "SCALE": "*u8", "OUT": "*bf16", "K": "i32", "groups": "i32"}


CASES = [
    Case(
        name="block-dequantize-nvfp4",
        kernel=_dequantize_kernel,
        signature=TYPES | {"OUTER": "*fp32"},
        constexprs={"B": 16, "G": 128},
    ),
    Case(
        name="block-dequantize-mxfp4",
        kernel=_dequantize_kernel,
        signature=TYPES,
        constexprs={"B": 32, "G": 128, "OUTER": None},
    ),
]
