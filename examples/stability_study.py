"""Which trainer learns from FP4 rollouts? Several arms on one task, each a `trace-fit` run of its own, in one table.

Every arm is one config with the switches of `ARMS`, so they differ in nothing else. All run in bf16-mixed, on a CPU as
well: in FP32 both sides would compute alike there, and a study of their differences would find none. Runs that are
finished are not repeated: a study that was interrupted, or that got more arms or seeds, goes on. `--hard` takes four
optimizer steps per rollout at the same learning rate: the trainer's weights leave the rollout's.

    OUT/<arm>_seed<n>/version_0/    what trace-fit leaves: summary.json, metrics.csv, curves.png, ...
    OUT/<arm>_seed<n>.log           its console
    OUT/stability.json, .png, .md   numbers of every rollout, the plot and the table   (with --hard: <name>_hard)

What was left out: runs side by side. They would share cores, and reward over seconds would say nothing. Who wants
them all the same starts the script once per arm and once more, with all of them, for the table.

    OMP_NUM_THREADS=1 python examples/stability_study.py --out runs/stability          about 1.5 minutes a run
    python examples/stability_study.py --config configs/grpo_fp4_progressions.yaml --steps 200 --seeds 0 --arms bf16 \
        naive naive_tis qat trace naive_w4a16 trace_w4a16 --out runs/progressions      GPU, a few minutes a run
"""

import argparse
import json
import math
import os
import statistics
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from support.runs import cell, curves, mean, run_fit, training_rows

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "grpo_fp4.yaml"
NOT_GUIDED = ["--recipe.guidance.mode=none"]
W4A16 = "--recipe.activations=none"
SIX = "--recipe.guidance.sites=[attn_in,o_in,mlp_in,down_in,k,v]"
NAIVE = [*NOT_GUIDED, "--recipe.trainer=bf16"]
QUADS = [*NOT_GUIDED, "--recipe.trainer=qat_weights", "--recipe.residual_share=0.5"]
MILD_W4A16, MILD = (f"--recipe={CONFIG.parent / 'recipes' / f'{gpu}_small.yaml'}" for gpu in ("hopper", "blackwell"))
ARMS: dict[str, tuple[str, list[str]]] = {
    "bf16": (
        "BF16 rollout",
        [*NOT_GUIDED, *(f"--recipe.{part}=none" for part in ("weights", "activations", "kv_cache"))],
    ),
    "naive": ("FP4 rollout, trainer not quantised", [*NAIVE, "--model.corrections=[]"]),
    "naive_tis": ("the same, TIS", NAIVE),
    "qat": ("symmetric QAT, TIS", NOT_GUIDED),
    "quads": ("QUADS (BF16 cache), TIS", [*QUADS, "--recipe.kv_cache=none"]),
    "quads_kv4": ("QUADS with FP4 cache, TIS", QUADS),
    "trace_half": ("TRACE, six sites of the last half, TIS", ["--recipe.guidance.layers=last_half", SIX]),
    "trace": ("TRACE as shipped, TIS", []),
    "trace_six": ("TRACE, six sites of all layers, TIS", [SIX]),
    "naive_w4a16": ("W4A16KV4 rollout, trainer not quantised, TIS", [*NAIVE, W4A16]),
    "qat_w4a16": ("W4A16KV4, symmetric QAT, TIS", [*NOT_GUIDED, W4A16]),
    "trace_w4a16": ("W4A16KV4, TRACE as shipped, TIS", [W4A16]),
    "trace_w4a16_46": ("W4A16KV4 with four-over-six, TRACE as shipped, TIS", [W4A16, "--recipe.four_over_six=true"]),
    "trace_w4a16_mild": ("W4A16KV4 rounded mildly, TRACE as shipped, TIS", [MILD_W4A16]),
    "trace_mild": ("W4A4KV4 rounded mildly, TRACE, TIS", [MILD]),
}
DEFAULT_ARMS = ["bf16", "naive", "naive_tis", "qat", "quads", "trace_half", "trace", "trace_six"]
HARD = ["--model.num_minibatches=4"]
CURVES = {
    "reward": "reward",
    "mean_abs_dlogp": "sampling/sampling_logp_difference/mean",
    "max_abs_dlogp": "sampling/sampling_logp_difference/max",
    "entropy": "entropy",
    "length": "completions/mean_length",
    "grad_norm": "grad_norm",
    "codes_after": "guidance/code_mismatch_after",
    "seconds": "timing/step_s",
}
PANELS = {"reward": "training reward", "mean_abs_dlogp": "mean |Δ log p|", "entropy": "entropy", "length": "tokens"}
LAST = 10  # steps that the table's last values are means of

Study = dict[str, dict[str, Any]]  # arm -> seed -> summary and curves


def run_name(args: argparse.Namespace, arm: str, seed: int) -> str:
    return f"{arm}_seed{seed}{'_hard' if args.hard else ''}"


def runs(args: argparse.Namespace, arm: str, seed: int) -> list[tuple[Path, dict[str, Any]]]:
    """Folder and summary of the runs there are of an arm, those with most rollouts first."""
    paths = args.out.glob(f"{run_name(args, arm, seed)}/version_*/summary.json")
    found = [(path.parent, json.loads(path.read_text())) for path in sorted(paths)]
    return sorted(found, key=lambda run: -run[1]["rollouts"])


def finished(args: argparse.Namespace, arm: str, seed: int) -> bool:
    """Whether there is a finished run of as many rollouts."""
    return any(
        summary["status"] == "finished" and summary["rollouts"] == args.steps for _, summary in runs(args, arm, seed)
    )


def run_arm(args: argparse.Namespace, arm: str, seed: int) -> None:
    """One `trace-fit fit` in a process of its own; its console goes into a file."""
    optimizer_steps = args.steps * (4 if args.hard else 1)
    arguments = [
        *(f"--config={args.config}", f"--seed_everything={seed}"),
        *(f"--runs_dir={args.out}", f"--run_name={run_name(args, arm, seed)}"),
        *(f"--trainer.max_steps={optimizer_steps}", f"--trainer.val_check_interval={min(40, args.steps)}"),
        *("--trainer.precision=bf16-mixed", "--trainer.enable_progress_bar=false"),
        "--trainer.enable_checkpointing=false",
        *(HARD if args.hard else []),
        *ARMS[arm][1],
        *args.extra,
    ]
    run_fit(arguments, args.out / f"{run_name(args, arm, seed)}.log", f"{arm}, seed {seed}")


def collect(args: argparse.Namespace) -> Study:
    """Everything measured, by runs that were stopped as well: the table says how many rollouts each had."""
    study: Study = {}
    for arm in ARMS:
        for seed in args.seeds:
            for folder, summary in runs(args, arm, seed)[:1]:
                study.setdefault(arm, {})[str(seed)] = {
                    "summary": summary,
                    "curves": curves(training_rows(folder), CURVES),
                }
    return study


def table(study: Study) -> str:
    """Markdown: one row per arm, means over its seeds."""
    head = (
        f"| arm | seeds | rollouts | held-out, before → after | reward, last {LAST} | mean abs Δlogp, run "
        f"| last {LAST} | max, run | codes after | entropy, last {LAST} | s / rollout |"
    )
    lines = [head, "|---" * (head.count("|") - 1) + "|"]
    for arm, seeds in study.items():
        summaries, of_seeds = zip(*((run["summary"], run["curves"]) for run in seeds.values()), strict=True)
        before, after = ([s["heldout"][side] for s in summaries] for side in ("first", "last"))
        seconds = [mean(c["seconds"][-LAST:]) for c in of_seeds]
        cells = [
            ARMS[arm][0],
            str(len(seeds)),
            "/".join(str(summary["rollouts"]) for summary in summaries),
            f"{cell(before[:1])} → {cell(after)}",
            cell([mean(c["reward"][-LAST:]) for c in of_seeds]),
            cell([s["divergence"]["mean_abs_dlogp"] for s in summaries], 4),
            cell([mean(c["mean_abs_dlogp"][-LAST:]) for c in of_seeds], 4),
            cell([s["divergence"]["max_abs_dlogp"] for s in summaries], 2),
            cell([s["code_mismatch"]["after"] for s in summaries], 4),
            cell([mean(c["entropy"][-LAST:]) for c in of_seeds]),
            cell(seconds, 2),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(study: Study, path: Path) -> None:
    """Four metrics over steps (above) and over seconds (below); thin lines are seeds, thick ones their mean."""
    figure = Figure(figsize=(18, 8), dpi=100, layout="constrained")
    axes = figure.subplots(2, len(PANELS))
    for color, (arm, seeds) in enumerate(study.items()):
        of_seeds = [run["curves"] for run in seeds.values()]
        for column, name in enumerate(PANELS):
            smooth = [_smooth(curve[name]) for curve in of_seeds]
            times = [_cumulated(curve["seconds"]) for curve in of_seeds]
            for row, x in enumerate(([list(range(len(y))) for y in smooth], times)):
                for one_x, y in zip(x, smooth, strict=True):
                    axes[row][column].plot(one_x, y, color=f"C{color}", alpha=0.3, linewidth=0.7)
                middle = [statistics.fmean(values) for values in zip(*smooth, strict=False)]
                mean_x = [statistics.fmean(values) for values in zip(*x, strict=False)]
                axes[row][column].plot(mean_x, middle, color=f"C{color}", linewidth=1.6, label=ARMS[arm][0])
    for row, unit in enumerate(("rollouts", "seconds of training")):
        for axis, (name, title) in zip(axes[row], PANELS.items(), strict=True):
            axis.set(title=f"{title}, mean of 5", xlabel=unit)
            axis.grid(True, alpha=0.25)
            if name == "mean_abs_dlogp":
                axis.set_yscale("symlog", linthresh=1e-3)
                axis.set_ylim(bottom=0)
    axes[0][0].legend(fontsize=8)
    figure.savefig(path)


def _smooth(curve: list[float | None], window: int = 5) -> list[float]:
    means = []
    for end in range(1, len(curve) + 1):
        known = [value for value in curve[max(0, end - window) : end] if value is not None]
        means.append(statistics.fmean(known) if known else math.nan)
    return means


def _cumulated(seconds: list[float | None]) -> list[float]:
    total, sums = 0.0, []
    for value in seconds:
        total += value or 0.0
        sums.append(total)
    return sums


def report(args: argparse.Namespace) -> str:
    """Write what is finished so far; returns the table."""
    study, name = collect(args), f"stability{'_hard' if args.hard else ''}"
    switches = {arm: [*(HARD if args.hard else []), *ARMS[arm][1], *args.extra] for arm in study}
    content = {"config": args.config.name, "steps": args.steps, "hard": args.hard, "switches": switches, "arms": study}
    (args.out / f"{name}.json").write_text(json.dumps(content, separators=(",", ":")) + "\n")
    plot(study, args.out / f"{name}.png")
    text = table(study)
    (args.out / f"{name}.md").write_text(text + "\n")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--steps", type=int, default=120, help="rollouts per run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=DEFAULT_ARMS)
    parser.add_argument("--hard", action="store_true", help="four optimizer steps per rollout")
    parser.add_argument("--out", type=Path, default=Path("runs/stability"))
    parser.epilog = "Other arguments go to trace-fit, in every arm: --data.batch_size=8"
    args, args.extra = parser.parse_known_args()
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.nice(5)
    for seed in args.seeds:  # all arms of a seed first: an unfinished study can be compared
        for arm in args.arms:
            if not finished(args, arm, seed):
                print(f"{arm}, seed {seed}", flush=True)
                run_arm(args, arm, seed)
                report(args)
    print(report(args))


if __name__ == "__main__":
    main()
