"""Do the shipped algorithms learn? One `trace-fit` run per recipe of configs/recipes and seed, in one table.

Every run is the config with one recipe on top, so runs differ in nothing else. `--steps` counts rollouts; a recipe with
several optimizer steps per rollout takes more of those. Finished runs are not repeated, so a study may be interrupted,
or get more recipes or seeds. This is a check that each algorithm works, not a ranking: nothing was tuned per algorithm,
and seconds are left out, because runs beside each other share the machine.

    OUT/<recipe>_seed<n>/version_0/      what trace-fit leaves: summary.json, metrics.csv, curves.png, ...
    OUT/<recipe>_seed<n>.log             its console
    OUT/algorithms.json, .md             what was measured, and the table

    OMP_NUM_THREADS=1 python examples/algorithms_study.py --out runs/algorithms           a minute a run on one core
    python examples/algorithms_study.py --config configs/grpo_fp4_smollm2.yaml --steps 60 --seeds 0 --jobs 5 \
        --recipes grpo dapo gspo cispo rloo --out runs/algorithms_smollm2                  five runs beside each other
"""

import argparse
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml
from support.runs import cell, curves, mean, run_fit, training_rows

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
# The others in configs/recipes are number formats.
RECIPES = sorted(path.stem for path in (CONFIGS / "recipes").glob("*.yaml") if "model" in yaml.safe_load(path.open()))
CURVES = {"reward": "reward", "entropy": "entropy", "grad_norm": "grad_norm", "kl": "kl"}
CLIPPED = ("clip_ratio/region_mean", "cispo/capped_share")
LAST = 10  # rollouts that last values are means of


def finished(args: argparse.Namespace, recipe: str, seed: int) -> Path | None:
    """The folder of a finished run of as many rollouts, if there is one."""
    for path in sorted(args.out.glob(f"{recipe}_seed{seed}/version_*/summary.json")):
        summary = json.loads(path.read_text())
        if summary["status"] == "finished" and summary["rollouts"] == args.steps:
            return path.parent
    return None


def run(args: argparse.Namespace, recipe: str, seed: int) -> None:
    """The config with the recipe on top, for `args.steps` rollouts."""
    overlay = CONFIGS / "recipes" / f"{recipe}.yaml"
    steps_per_rollout = yaml.safe_load(overlay.read_text())["model"].get("num_minibatches", 1)
    arguments = [
        *(f"--config={args.config}", f"--config={overlay}"),
        *(f"--seed_everything={seed}", f"--runs_dir={args.out}", f"--run_name={recipe}_seed{seed}"),
        *(f"--trainer.max_steps={args.steps * steps_per_rollout}", f"--trainer.val_check_interval={args.steps}"),
        *("--trainer.enable_progress_bar=false", "--trainer.enable_checkpointing=false"),
        *args.extra,
    ]
    run_fit(arguments, args.out / f"{recipe}_seed{seed}.log", f"{recipe}, seed {seed}")
    print(f"{recipe}, seed {seed}: done", flush=True)


def measured(folder: Path) -> dict[str, Any]:
    """What the table needs of a finished run."""
    summary = json.loads((folder / "summary.json").read_text())
    rows = training_rows(folder)
    clipped = next((key for key in CLIPPED if rows and rows[0].get(key)), CLIPPED[0])
    curves_of_run = curves(rows, CURVES | {"clipped": clipped})
    kept = ("heldout", "reward", "divergence", "steps", "rollouts", "model", "task", "recipe")
    return {"summary": {key: summary[key] for key in kept}, "curves": curves_of_run}


def table(study: dict[str, dict[str, Any]]) -> str:
    """Markdown: one row per recipe, mean (smallest to largest) over its seeds."""
    last = f"reward, last {LAST} | entropy, last {LAST}"
    head = f"| recipe | seeds | held-out before | after | {last} | clipped, run |"
    lines = [head, "|---" * (head.count("|") - 1) + "|"]
    for recipe, runs in study.items():
        summaries, measured_curves = zip(*((run["summary"], run["curves"]) for run in runs.values()), strict=True)
        cells = [
            recipe,
            str(len(runs)),
            *(cell([s["heldout"][side] for s in summaries]) for side in ("first", "last")),
            *(cell([mean(c[name][-LAST:]) for c in measured_curves]) for name in ("reward", "entropy")),
            cell([mean(c["clipped"]) for c in measured_curves]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def report(args: argparse.Namespace) -> str:
    """Write what is finished so far; returns the table."""
    study: dict[str, dict[str, Any]] = {}
    for recipe in args.recipes:
        for seed in args.seeds:
            if folder := finished(args, recipe, seed):
                study.setdefault(recipe, {})[str(seed)] = measured(folder)
    content = {"config": args.config.name, "steps": args.steps, "switches": args.extra, "recipes": study}
    (args.out / "algorithms.json").write_text(json.dumps(content, separators=(",", ":")) + "\n")
    text = table(study)
    (args.out / "algorithms.md").write_text(text + "\n")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=CONFIGS / "grpo_fp4.yaml")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--steps", type=int, default=40, help="rollouts per run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs beside each other")
    parser.add_argument("--out", type=Path, default=Path("runs/algorithms"))
    parser.epilog = "Other arguments go to trace-fit, in every run: --data.batch_size=8"
    args, args.extra = parser.parse_known_args()
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    missing = [(recipe, seed) for seed in args.seeds for recipe in args.recipes if finished(args, recipe, seed) is None]

    def work(job: tuple[str, int]) -> None:
        run(args, *job)

    with ThreadPoolExecutor(args.jobs) as pool:
        for _ in pool.map(work, missing):
            report(args)
    print(report(args))


if __name__ == "__main__":
    main()
