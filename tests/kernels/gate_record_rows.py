"""A row of all sites, shortened."""

from __future__ import annotations

from compile_gate import Case

from trace_kernels.record_rows import TILE, _shorten_kernel
from trace_kernels.syndromes import WINDOW

CASES = [
    Case(
        name=f"record-rows-{name}",
        kernel=_shorten_kernel,
        signature={
            **{"DATA": "*u8", "OUT": "*u8", "FIELDS": "*i32", "stride_data": "i32", "stride_out": "i32"},
        },
        constexprs={"SCALE_BITS": scale_bits, "SYNDROME": syndrome, "MASK": WINDOW, "T": TILE},
    )
    for name, scale_bits, syndrome in (("scales", True, False), ("syndromes", True, True))
]
