"""The audit of inputs of linears and of K, V."""

from __future__ import annotations

from compile_gate import Case

from trace_kernels.audit_codes import audit_codes_kernel

TYPES = {
    **{"X": "*bf16", "TOKENS": "*i64", "ENTRIES": "*i64", "AUDIT": "*u8", "ROW": "*i64", "SCALE": "*u8"},
    **{"CODES": "*u8", "OUTER": "*fp32", "OUT": "*fp32"},
    **dict.fromkeys(("stride_audit", "stride_scale", "stride_codes", "stride_outer"), "i32"),
}
PLAIN = {"B": 16, "FOUR": False, "FULL": False, "BITS": False}

CASES = [
    Case(
        name="audit-codes-inputs",
        kernel=audit_codes_kernel,
        signature=TYPES,
        constexprs=PLAIN | {"D": 2048, "HEADS": 1, "G": 128, "OUTER_PER_HEAD": False},
    ),
    Case(
        name="audit-codes-kv-bits",
        kernel=audit_codes_kernel,
        signature=TYPES,
        constexprs=PLAIN | {"D": 128, "HEADS": 8, "G": 64, "OUTER_PER_HEAD": True, "BITS": True, "FULL": True},
    ),
]
