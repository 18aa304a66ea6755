"""Weights and rows as they are launched for a hidden size of 4096."""

from __future__ import annotations

from compile_gate import Case

from trace_kernels.block_quantize import _amax_kernel, _quantize_kernel

SIGNATURE = {"QDATA": "*u8", "SCALE": "*u8", "OUTER": "*fp32", "PARITY": "*u8", "rows": "i32", "outer_stride": "i32"}
SHAPE = {"K": 4096, "B": 16, "R": 1, "G": 256, "V": 8, "MASKED": False}
FUSION = {"enable_fp_fusion": False}


def case(name: str, types: dict[str, str], constants: dict[str, object]) -> Case:
    return Case(
        name=f"block-quantize-{name}",
        kernel=_quantize_kernel,
        signature=SIGNATURE | types,
        constexprs=SHAPE | {"V_DENSE": 0, "FOUR_OVER_SIX": False, "HAS_PARITY": False} | constants,
        options=FUSION,
    )


CASES = [
    case(
        "weights",
        {"X": "*bf16", "OUTER_IN": "*i32", "DENSE": "*bf16"},
        {"SOURCE": 3, "V_DENSE": 8, "PARITY": None} | {"K": 12288},
    ),
    case(
        "rows-four-over-six",
        {"X": "*fp32", "OUTER_IN": "*fp32"},
        {"SOURCE": 1, "V": 4, "FOUR_OVER_SIX": True, "HAS_PARITY": True, "DENSE": None},
    ),
    case(
        "mxfp4",
        {"X": "*bf16"},
        {"SOURCE": 0, "B": 32, "G": 128, "OUTER_IN": None, "HAS_PARITY": True, "DENSE": None},
    ),
    Case(
        name="block-quantize-amax",
        kernel=_amax_kernel,
        signature={"X": "*bf16", "AMAX": "*i32", "numel": "i32"},
        constexprs={"TILE": 4096},
    ),
]
