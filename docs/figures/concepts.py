"""The figures of docs/concepts.md, by the library's own quantisers and from measured results.

python docs/figures/concepts.py        writes the .svg files beside this one

grid      two nearly equal numbers on different codes; how many codes of a tensor a small difference flips
guided    rounding to nearest, and steered by one bit
step      one RL step as data sees it
gap       trainer against rollout, from docs/results/guidance.json (SmolLM2 on an H200)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from trace_kernels import NVFP4
from trace_kernels.formats import E2M1_VALUES, e2m1_bracket, e2m1_decode, e2m1_encode

HERE = Path(__file__).parent
GUIDANCE = HERE.parent / "results" / "guidance.json"
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#777777"  # Okabe-Ito


def value(code: int) -> float:
    return float(e2m1_decode(torch.tensor([code], dtype=torch.uint8)))


def encode(number: float) -> int:
    return int(e2m1_encode(torch.tensor([number])))


def number_line(axis: Any, low: float, high: float) -> None:
    """The codes of [low, high] as ticks with their parity, and the borders between them."""
    for code, grid_value in enumerate(E2M1_VALUES):
        if low <= grid_value <= high:
            colour = BLUE if code % 2 else ORANGE
            axis.plot([grid_value] * 2, [-0.16, 0.16], color=colour, linewidth=3, solid_capstyle="butt")
            axis.text(grid_value, -0.3, f"{grid_value:g}", ha="center", va="top", fontsize=11)
            label = f"code {code}\nbit {code & 1}"
            axis.text(grid_value, -0.62, label, ha="center", va="top", fontsize=8, color=colour)
    axis.plot([low, high], [0, 0], color="black", linewidth=1)
    axis.set(xlim=(low - 0.3, high + 0.3), ylim=(-1.25, 1.0))
    axis.axis("off")


def arrow(axis: Any, start: float, end: float, height: float, colour: str, curve: float) -> None:
    style = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.6, "connectionstyle": f"arc3,rad={curve}"}
    axis.annotate("", xy=(end, 0.17), xytext=(start, height), arrowprops=style)


def draw_grid(figure: Figure) -> None:
    """Above: the whole grid, and two numbers beside a border. Below: how many codes BF16 rounding flips."""
    top, bottom = figure.subplots(2, 1, height_ratios=(1, 1.15))
    number_line(top, 0.0, 6.0)
    rollout, trainer = 2.47, 2.53
    for number, colour, label, side in ((rollout, ORANGE, "rollout", "right"), (trainer, BLUE, "trainer", "left")):
        rounded = value(encode(number))
        top.plot([number], [0.42], "o", color=colour, markersize=6)
        offset = -0.12 if side == "right" else 0.12
        top.text(number + offset, 0.48, f"{label}: {number} becomes {rounded:g}", ha=side, fontsize=10, color=colour)
        arrow(top, number, rounded, 0.40, colour, 0.15 if rounded < number else -0.15)
    top.set_title("The FP4 grid (E2M1), positive half: eight values", fontsize=11, loc="left")
    flips, noise = flipped_codes()
    bottom.plot(noise, flips, "o-", color=BLUE)
    bottom.set(xscale="log", xlabel="relative difference of the two inputs", ylabel="codes that differ, %")
    bottom.axvline(2.0**-9, color=GREY, linestyle="--", linewidth=1)
    bottom.text(2.0**-9, max(flips) * 0.95, " one BF16 rounding (2⁻⁹)", fontsize=9, color=GREY, va="top")
    bottom.set_title("Two copies of a tensor that differ a little, both rounded to NVFP4", fontsize=11, loc="left")


def flipped_codes() -> tuple[list[float], list[float]]:
    """Percent of NVFP4 codes that differ when every input moves by a random relative amount of that size."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1024, 4096, generator=generator)
    codes, noise = NVFP4().quantize(x).codes, [2.0**-k for k in (15, 13, 11, 9, 7, 5)]
    flips = []
    for size in noise:
        moved = x * (1 + size * (2 * torch.rand(x.shape, generator=generator) - 1))
        flips.append(100 * float((NVFP4().quantize(moved).codes != codes).float().mean()))
    return flips, noise


def draw_guided(figure: Figure) -> None:
    """Left: the bracket of one value and the bit that chooses. Right: the choice for all values of the trainer."""
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.1))
    number_line(left, 1.5, 4.0)
    rollout, trainer = 2.62, 2.38
    code, near = encode(rollout), int(e2m1_bracket(torch.tensor([trainer])))
    said = (
        f"rollout: {rollout} became {value(code):g}, code {code};\nits last bit, {code & 1}, is recorded",
        f"trainer: {trainer} lies between {value(near):g} and {value(near + 1):g};\n"
        f"nearest: {value(encode(trainer)):g}; the one with bit {code & 1}: {value(code):g}",
    )
    for height, text in zip((1.95, 1.45), said, strict=True):
        left.text(1.3, height, text, fontsize=9, va="top")
    left.plot([trainer], [0.42], "o", color="black", markersize=6)
    arrow(left, trainer, value(encode(trainer)), 0.40, GREY, 0.25)
    arrow(left, trainer, value(code), 0.40, BLUE, -0.25)
    left.text(2.0, 0.36, "nearest", ha="right", fontsize=9, color=GREY)
    left.text(3.0, 0.36, "guided", ha="left", fontsize=9, color=BLUE)
    left.set_ylim(-1.25, 2.0)
    x, nearest, guided = guided_staircase(code)
    right.plot(x, x, color="#cccccc", linewidth=1)
    right.plot(x, nearest, color=GREY, label="to the nearest")
    right.plot(x, guided, color=BLUE, label=f"guided by bit {code & 1}")
    right.axhspan(value(code) - 0.06, value(code) + 0.06, color=BLUE, alpha=0.15)
    right.text(0.05, value(code) + 0.12, "the rollout's value", fontsize=8, color=BLUE)
    right.set(xlabel="trainer's value, in units of the block scale", ylabel="rounded to", yticks=E2M1_VALUES)
    right.tick_params(axis="y", labelsize=8)
    right.legend(fontsize=9, loc="upper left", frameon=False)


def guided_staircase(code: int) -> tuple[Any, Any, Any]:
    """Trainer's values in 0..6, each in a block of its own under one scale: to nearest, and by the parity of `code`."""
    fmt = NVFP4()
    x = torch.linspace(0, 6, 1201).unsqueeze(-1)
    row = torch.nn.functional.pad(x, (0, 15))
    scale = torch.full((len(x), 1), 0x38, dtype=torch.uint8)  # E4M3 byte of 1
    outer = torch.ones(len(x), 1)
    parity = torch.full(row.shape, code & 1, dtype=torch.uint8)
    guided = fmt.dequantize(fmt.round_parity(row, scale, outer, parity))[:, 0]
    return x[:, 0].numpy(), e2m1_decode(e2m1_encode(x[:, 0])).numpy(), guided.numpy()


def draw_step(figure: Figure) -> None:
    """One RL step: along the top to the right, and back along the bottom."""
    axis = figure.subplots()
    axis.set(xlim=(0, 13), ylim=(0.4, 5.2))
    axis.axis("off")
    box(axis, (0.1, 3.6, 2.2), "prompts", "PromptDataModule")
    box(axis, (3.0, 3.6, 3.4), "rollout in FP4", "LocalEngine: weights, activations,\nK and V rounded to 4 bits", BLUE)
    box(axis, (8.0, 3.6, 2.2), "rewards", "your function,\nin workers")
    box(axis, (10.7, 3.6, 2.2), "advantages", "within a group")
    box(axis, (3.0, 0.6, 3.4), "trainer", "PolicyModule: rounds alike,\nsteered by the record", GREEN)
    box(axis, (8.0, 0.6, 2.2), "loss, step", "of the master\nweights")
    for start, end, height in ((2.3, 3.0, 4.3), (6.4, 8.0, 4.3), (10.2, 10.7, 4.3), (6.4, 8.0, 1.3)):
        connect(axis, (start, height), (end, height))
    connect(axis, (11.8, 3.6), (10.2, 1.3), connectionstyle="angle,angleA=-90,angleB=0,rad=6")
    connect(axis, (5.4, 3.6), (5.4, 2.0), color=ORANGE, linewidth=2)
    connect(axis, (3.6, 2.0), (3.6, 3.6))
    record = "tokens, their log-probs, and the record:\nblock scales and one bit per element"
    axis.text(5.55, 2.8, record, fontsize=9, va="center", color=ORANGE)
    axis.text(3.45, 2.8, "new weights,\nquantised again", fontsize=9, ha="right", va="center")
    axis.text(7.2, 4.45, "answers", fontsize=9, ha="center")
    axis.text(7.2, 1.45, "log-probs", fontsize=9, ha="center")


def connect(axis: Any, start: tuple[float, float], end: tuple[float, float], **style: Any) -> None:
    axis.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "-|>", "color": "black"} | style)


def box(axis: Any, place: tuple[float, float, float], title: str, text: str, colour: str = "black") -> None:
    x, y, width = place
    frame = FancyBboxPatch((x + 0.1, y + 0.1), width - 0.2, 1.2, boxstyle="round,pad=0.1", fill=False, edgecolor=colour)
    axis.add_patch(frame)
    axis.text(x + width / 2, y + 1.02, title, ha="center", va="center", fontsize=11, color=colour)
    axis.text(x + width / 2, y + 0.45, text, ha="center", va="center", fontsize=8)


def draw_gap(figure: Figure) -> None:
    """Mean and largest gap of each arm at 2,048 tokens, as published."""
    rows = {row["name"]: row["value"] for row in json.loads(GUIDANCE.read_text())}
    arms = (
        ("floor", "BF16 on\nboth sides", GREY),
        ("naive", "trainer does\nnot round", ORANGE),
        ("qat", "rounds alike,\nby itself", "#E69F00"),
        ("parity", "guided by\none bit", BLUE),
    )
    for axis, recipe in zip(figure.subplots(1, 2, sharey=True), ("W4A16KV4", "W4A4KV4"), strict=True):
        for place, (arm, _, colour) in enumerate(arms):
            name = f"{'BF16' if arm == 'floor' else recipe}/{arm}/0 steps/2048 tokens"
            mean, most = rows[f"{name}/mean_abs_dlogp"], rows[f"{name}/max_abs_dlogp"]
            axis.bar(place, mean, color=colour, width=0.65)
            axis.plot([place], [most], "v", color=colour)
            axis.text(place, mean * 1.15, f"{mean:.4f}" if mean >= 1e-4 else f"{mean:.0e}", ha="center", fontsize=9)
        axis.set(yscale="log", ylim=(5e-6, 30), title=recipe, xticks=range(len(arms)))
        axis.set_xticklabels([label for _, label, _ in arms], fontsize=8)
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
    figure.axes[0].set_ylabel("|Δ log p|: mean, largest (▼)")


FIGURES = {
    "grid": (draw_grid, (8, 5.0)),
    "guided": (draw_guided, (9, 3.8)),
    "step": (draw_step, (9, 3.4)),
    "gap": (draw_gap, (9, 3.4)),
}


def main() -> None:
    matplotlib.rcParams.update({"svg.hashsalt": "trace", "axes.spines.top": False, "axes.spines.right": False})
    for name, (draw, size) in FIGURES.items():
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        figure.savefig(HERE / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
