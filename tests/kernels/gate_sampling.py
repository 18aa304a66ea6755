"""A vocabulary of 151,936, as it is launched."""

from __future__ import annotations

from compile_gate import Case

from trace_kernels.sampling import _chunk_kernel, _draw_kernel
from trace_kernels.truncation import _threshold_kernel

ROWS = {"PEAK": "*fp32", "MASS": "*fp32", "V": "i32", "inverse_temperature": "fp32"}
COUNTERS = dict.fromkeys(("SEED", "UID", "SAMPLE", "POSITION", "TOKEN"), "*i64")
SWITCHES = {"CHUNK": 4096, "PLACE": None, "GREEDY": False}

CASES = [
    Case(
        name="sampling-chunk",
        kernel=_chunk_kernel,
        signature=ROWS | {"LOGITS": "*fp32"},
        constexprs=SWITCHES | {"LEAST": None, "TRUNCATED": False},
    ),
    Case(
        name="sampling-draw",
        kernel=_draw_kernel,
        signature=ROWS | COUNTERS | {"LOGITS": "*bf16", "LEAST": "*fp32", "LOGPROB": "*fp32", "chunks": "i32"},
        constexprs=SWITCHES | {"TRUNCATED": True, "C": 64},
        options={"num_warps": 8},
    ),
    Case(
        name="sampling-threshold",
        kernel=_threshold_kernel,
        signature={"LOGITS": "*fp32", "LEAST": "*fp32", "inverse_temperature": "fp32"}
        | {"top_k": "i32", "top_p": "fp32", "min_p_gap": "fp32"},
        constexprs={"V": 151936, "BLOCK": 8192, "BITS": 32, "HAS_TOP_K": True, "HAS_TOP_P": True},
        options={"num_warps": 16},
    ),
]
