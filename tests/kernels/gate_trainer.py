"""Norm, rotary embedding, rotation and gated activation of the trainer, as a 1.7B model launches them."""

from __future__ import annotations

import triton.language as tl
from compile_gate import Case

from trace_kernels.hadamard import rotate_kernel
from trace_kernels.rms_norm import rms_norm_backward_kernel, rms_norm_kernel
from trace_kernels.rotary import rotary_kernel
from trace_kernels.swiglu import swiglu_backward_kernel, swiglu_kernel

NUMBERS = {"M": "i32", "C": "i32", "eps": "fp32", "inverse_C": "fp32"}
ROW, HEADS = {"R": 1, "BLOCK_C": 2048}, {"R": 16, "BLOCK_C": 128}
STRIDES = [f"{x}_stride_{axis}" for x in "xy" for axis in "BHT"]
ANGLES = dict.fromkeys(("COS", "SIN"), "*fp32") | dict.fromkeys(("T", "heads", "D", *STRIDES, "angle_stride_B"), "i32")
TURN = {"DTYPE": tl.float32, "BLOCK_H": 16, "BLOCK_D": 64}

CASES = [
    Case(
        name="trainer-norm",
        kernel=rms_norm_kernel,
        signature={"X": "*fp32", "GAIN": "*fp32", "Y": "*fp32", **NUMBERS},
        constexprs=ROW,
        options={"num_warps": 4, "enable_fp_fusion": False},
    ),
    Case(
        name="trainer-norm-backward",
        kernel=rms_norm_backward_kernel,
        signature=dict.fromkeys(("X", "GAIN", "DY", "DX", "DGAIN"), "*fp32") | NUMBERS,
        constexprs=ROW,
        options={"num_warps": 4, "enable_fp_fusion": False},
    ),
    Case(
        name="trainer-qk-norm-backward",
        kernel=rms_norm_backward_kernel,
        signature={"X": "*bf16", "GAIN": "*fp32", "DY": "*fp32", "DX": "*bf16", "DGAIN": "*fp32", **NUMBERS},
        constexprs=HEADS,
        options={"num_warps": 4, "enable_fp_fusion": False},
    ),
    Case(
        name="trainer-rotary",
        kernel=rotary_kernel,
        signature={"X": "*fp32", "Y": "*fp32", **ANGLES},
        constexprs=TURN | {"BACKWARD": False},
        options={"num_warps": 4, "enable_fp_fusion": False},
    ),
    Case(
        name="trainer-rotate",
        kernel=rotate_kernel,
        signature={"X": "*fp32", "Y": "*fp32", "numel": "i32"},
        constexprs={"TILE": 2048},
        options={"num_warps": 4, "enable_fp_fusion": False},
    ),
    Case(
        name="trainer-swiglu",
        kernel=swiglu_kernel,
        signature={"GATE": "*bf16", "UP": "*bf16", "Y": "*bf16", "numel": "i32"},
        constexprs={"TILE": 2048},
        options={"num_warps": 4, "enable_fp_fusion": False},
    ),
    Case(
        name="trainer-swiglu-backward",
        kernel=swiglu_backward_kernel,
        signature=dict.fromkeys(("GATE", "UP", "DY", "DGATE", "DUP"), "*bf16") | {"numel": "i32"},
        constexprs={"TILE": 2048},
        options={"num_warps": 4, "enable_fp_fusion": False},
    ),
]
