"""Decode attention: what the main loop costs per K or V element, and that a block of shared-prefix columns fits."""

from __future__ import annotations

from typing import Any

from compile_gate import Case

from trace_kernels import attention_dense, attention_fp4

POINTERS = {
    "Q": "*bf16", "K": "*i32", "K_SCALE": "*u8", "K_OUTER": "*fp32", "V": "*i32", "V_SCALE": "*u8", "V_OUTER": "*fp32",
    "TABLE": "*i32", "SEQ_LENS": "*i32", "PREFIX_LENS": "*i32", "ROWS": "*i32",
    "OUT": "*bf16", "PARTS": "*fp32", "LSE": "*fp32",
}  # fmt: skip
COUNTS = ("batch", "kv_heads", "table_width", "n", "blocks", "first_slot")
TYPES = POINTERS | dict.fromkeys(COUNTS, "i32") | {"factor": "fp32"}
OWN = ("PREFIX_LENS", "ROWS")
NO_OUTER = ("K_OUTER", "V_OUTER")


def case(name: str, *, absent: tuple[str, ...], bound: float, tokens: int = 32, **constants: Any) -> Case:
    """One launch of the FP4 kernel, or with `FP8` among the constants of the dense one, over pages of 64 tokens."""
    dense = "FP8" in constants
    pages = {"K": "*bf16", "V": "*bf16"} if dense else {}
    values = {"GROUP": 4, "P": 64, "CHUNK": 512, "WINDOW": 0, "BN": tokens}
    values |= {} if dense else {"MX": False, "ASM": True}
    kernel = attention_dense.dense_kernel if dense else attention_fp4.fp4_kernel
    present = [key for key in kernel.arg_names if key in TYPES and key not in absent]
    return Case(
        name=f"attention-{name}",
        kernel=kernel,
        signature={key: (TYPES | pages)[key] for key in present},
        constexprs=values | constants | dict.fromkeys(absent),
        options={"num_warps": 4 if dense else 1, "num_stages": 3},
        matrix={90: "HMMA.16816.F32"},
        elements=2 * tokens * constants["D"],
        max_instructions={90: bound},
    )


CASES = [
    case("nvfp4-128", absent=OWN, bound=4.0, D=128, HEADS=8),
    case("nvfp4-64", absent=OWN, bound=4.0, tokens=64, D=64, HEADS=4),
    case("mxfp4-prefix", absent=NO_OUTER, bound=4.4, tokens=64, D=128, HEADS=16, MX=True),
    case("bf16", absent=OWN + NO_OUTER, bound=2.7, tokens=64, D=128, HEADS=16, FP8=False),
]
