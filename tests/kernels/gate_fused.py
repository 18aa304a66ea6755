"""The small kernels of a decoder layer as an 8B model launches them."""

from __future__ import annotations

import triton.language as tl
from compile_gate import Case

from trace_kernels.gated_activation import gated_activation_kernel
from trace_kernels.kv_append import kv_append_kernel
from trace_kernels.norm import add_rms_norm_kernel
from trace_kernels.rows import round_rows_kernel

RECORD = {"SCALE": "*u8", "PARITY": "*u8"}
SIZES = {"M": "i32", "C": "i32", "stride_S": "i32"}
STRIDES = dict.fromkeys(("stride_scale", "stride_outer", "stride_parity", "stride_codes"), "i32")
ROUND = {"FMT": "nvfp4", "FOUR": True, "PERMUTE": True}

CASES = [
    Case(
        name="fused-norm",
        kernel=add_rms_norm_kernel,
        signature={"RESIDUAL": "*fp32", "PARTS": "*fp32", "GAIN": "*fp32", "OUT": "*bf16", "OUTER": "*fp32"}
        | (RECORD | SIZES | STRIDES | {"eps": "fp32", "inverse_C": "fp32"}),
        constexprs={"CODES": None, "S": 4, "DTYPE": tl.bfloat16, "BLOCK_C": 4096, **ROUND},
        options={"num_warps": 8, "enable_fp_fusion": False},
    ),
    Case(
        name="fused-activation",
        kernel=gated_activation_kernel,
        signature={"PARTS": "*fp32", "OUT": "*bf16", **RECORD, **SIZES, **STRIDES},
        constexprs={"AMAX": None, "CODES": None, "S": 2, "DTYPE": tl.bfloat16, "ACTIVATION": "silu"}
        | {"FMT": "mxfp4", "PERMUTE": True, "CHUNK": 1024},
        options={"num_warps": 4, "enable_fp_fusion": False},
    ),
    Case(
        name="fused-round",
        kernel=round_rows_kernel,
        signature={"X": "*bf16", "AMAX": "*fp32", "OUT": "*bf16", "OUTER": "*fp32", **RECORD}
        | {"M": "i32", "C": "i32", "NUM_AMAX": "i32", **STRIDES},
        constexprs={"CODES": None, "BLOCK_AMAX": 16, "CHUNK": 1024, **ROUND},
        options={"num_warps": 4, "enable_fp_fusion": False},
    ),
    Case(
        name="fused-append",
        kernel=kv_append_kernel,
        signature=dict.fromkeys(("PARTS", "Q_GAIN", "K_GAIN", "COS", "SIN", "Q", "K_OUTER", "V_OUTER"), "*fp32")
        | dict.fromkeys(("K_DATA", "K_SCALE", "V_DATA", "V_SCALE"), "*u8")
        | {"SLOTS": "*i64", "eps": "fp32", "inverse_D": "fp32"}
        | dict.fromkeys(("stride_S", "H", "K", "D"), "i32"),
        constexprs={"PAGE": 64, "S": 4, "DTYPE": tl.bfloat16, "NORM_DTYPE": tl.float32, "ROTATED": True}
        | {"FMT": "nvfp4", "FOUR": True, "BLOCK_D": 128},
        options={"num_warps": 1, "enable_fp_fusion": False},
    ),
]
