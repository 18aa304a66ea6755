"""Block-scaled FP4 on Blackwell: the tensor core must get the codes themselves, not upcast copies."""

from __future__ import annotations

from compile_gate import Case

from trace_kernels import native

SIGNATURE = {
    "XQ": "*u8", "XS": "*u8", "X_OUTER": "*fp32", "WQ": "*u8", "WS": "*u8", "W_OUTER": "*fp32", "Y": "*bf16",
    "M": "i32", "N": "i32",
}  # fmt: skip
# The unit of the fifth generation shows as UTC...OMMA, the warp-wide one of sm_120 as OMMA; an upcast would be another
# MMA. 4X: a scale for every 16 elements.
NVFP4_UNITS = {100: r"^UTCOMMA.*\.4X", 120: r"^OMMA\.SF\..*E2M1\.E2M1\.UE4M3\.4X"}
MXFP4_UNITS = {100: r"^UTCOMMA", 120: r"^OMMA\.SF\..*E2M1\.E2M1\.E8"}


def case(name: str, block: int, tokens: int, matrix: dict[int, str]) -> Case:
    constexprs = {
        "BIAS": None, "row_bytes": 2048, "row_scales": 4096 // block,
        "BN": 128, "BM": tokens, "BK": 256, "BLOCK": block, "EVEN": True,
        "HAS_OUTER": block == 16, "HAS_BIAS": False,
    }  # fmt: skip
    return Case(
        name=name, kernel=native._native_fp4_linear, signature=SIGNATURE, constexprs=constexprs,
        options={"num_warps": 8, "num_stages": 3}, architectures=(100, 120), matrix=matrix,
    )  # fmt: skip


CASES = [
    case("native-nvfp4-M16", 16, 16, NVFP4_UNITS),
    case("native-nvfp4-M128", 16, 128, NVFP4_UNITS),
    case("native-mxfp4-M16", 32, 16, MXFP4_UNITS),
]
