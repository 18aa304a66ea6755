"""The trainer's rounding: inputs of linears (one outer scale per token) and K, V (per head), from BF16 to BF16."""

from __future__ import annotations

from compile_gate import Case

from trace_kernels.round_values import round_values_kernel

TYPES = {
    **{"X": "*bf16", "OUT": "*bf16", "ROW": "*i64", "SCALE": "*u8", "CODES": "*u8", "OUTER": "*fp32"},
    **dict.fromkeys(("own_stride", "stride_scale", "stride_codes", "stride_outer"), "i32"),
}
PLAIN = {"B": 16, "FOUR": False, "FULL": False, "BITS": False}
INPUT = PLAIN | {"D": 2048, "HEADS": 1, "G": 128, "SOURCE": 1, "OUTER_PER_HEAD": False, "OWN": None}
KV = PLAIN | {"D": 128, "HEADS": 8, "G": 64, "SOURCE": 2, "OUTER_PER_HEAD": True}
NEAREST = {"ROW": None, "SCALE": None, "CODES": None, "OUTER": None}


def without(*names: str) -> dict[str, str]:
    return {name: kind for name, kind in TYPES.items() if name not in names}


CASES = [
    Case(name="round-values-parity", kernel=round_values_kernel, signature=TYPES, constexprs=INPUT),
    Case(
        name="round-values-full-bits",
        kernel=round_values_kernel,
        signature=TYPES,
        constexprs=INPUT | {"FULL": True, "BITS": True},
    ),
    Case(name="round-values-kv", kernel=round_values_kernel, signature=TYPES | {"OWN": "*fp32"}, constexprs=KV),
    Case(
        name="round-values-mxfp4-kv",
        kernel=round_values_kernel,
        signature=without("OUTER"),
        constexprs=KV | {"B": 32, "G": 32, "SOURCE": 0, "OWN": None, "OUTER": None},
    ),
    Case(
        name="round-values-weights",
        kernel=round_values_kernel,
        signature=without(*NEAREST) | {"X": "*fp32", "OWN": "*fp32"},
        constexprs={k: v for k, v in (INPUT | NEAREST | {"SOURCE": 2}).items() if k != "OWN"},
    ),
    Case(
        name="round-values-four-over-six",
        kernel=round_values_kernel,
        signature=without(*NEAREST),
        constexprs=INPUT | NEAREST | {"FOUR": True},
    ),
]
