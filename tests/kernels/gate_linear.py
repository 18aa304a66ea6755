"""The FP4 linear at the launches that `linear.TILES` makes for a decode batch and for a large one."""

from __future__ import annotations

from compile_gate import Case

from trace_kernels import linear

SIGNATURE = {
    "XP": "*bf16", "W": "*i32", "SCALE": "*u8", "OUTER": "*fp32", "PARTS": "*fp32",
    "M": "i32", "x_blocks": "i32", "steps": "i32", "steps_per_split": "i32",
}  # fmt: skip


def case(name: str, tokens: int, tile: linear.Tile, most: float, *, mx: bool = False) -> Case:
    constexprs = {
        "BIAS": None, "N": 4096, "row_words": 512, "row_scales": 128 if mx else 256, "BF16": True, "MX": mx,
        "BN": tile.rows, "BM": tokens, "KW": tile.words, "EVEN": True, "HAS_OUTER": not mx, "HAS_BIAS": False,
        "ASM": True,
    }  # fmt: skip
    return Case(
        name=name, kernel=linear._fp4_linear, signature=SIGNATURE, constexprs=constexprs,
        options={"num_warps": tile.warps, "num_stages": tile.stages},
        matrix={90: r"^HMMA\.16816\.F32\.BF16" if tile.warps < 4 else r"^HGMMA.*BF16"},
        architectures=(90, 100, 120) if tokens < 64 else (90,),
        elements=tile.rows * tile.words * 8, max_instructions={90: most},
    )  # fmt: skip


CASES = [
    case("linear-M8-wide", 8, linear.TILES[8][0], 3.8),
    case("linear-M8-narrow", 8, linear.TILES[8][1], 3.8),
    case("linear-M16-mxfp4", 16, linear.TILES[16][0], 4.3, mx=True),
    case("linear-M64", 64, linear.TILES[64][0], 4.4),
]
