"""How closely do trainer and rollout agree, and which part of the record does that take? One model, one table.

One rollout per number format records everything; each arm is a part of that record, or none (`support/agreement.py`
says how the two sides are run and compared). The first row, BF16 on both sides, is the floor: what two sets of kernels
make of the same unquantised policy.

    naive    the trainer is not quantised           full      the rollout's scales and codes at the default sites
    qat      quantised alike, own scales and codes  parity    scales and one bit per code, as training ships
    scales   the rollout's scales, nearest codes    six       parity at all six sites; others say what differs

With `--drift` the trainer has taken optimizer steps that the rollout has not: policy gradients with random advantages,
the same weights for all arms. There the floor is no goal but shows how far the policy has really moved.

Records below one bit per element (`support/syndromes.py`, arms `one_in_2` to `five_of_16`) run if `--arms` names them.

    python examples/guidance_study.py --json study.json --plot study.png             2,048 tokens of SmolLM2, for a GPU
    python examples/guidance_study.py --model builtin:tiny-qwen3                     a CPU, under a minute
"""

import argparse
import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from matplotlib.figure import Figure
from support.agreement import (
    Arm,
    AuditedNearest,
    RolloutScales,
    full_record,
    load_masters,
    log_probs,
    make_trainer,
    measure,
    prompt_texts,
    restrict,
    roll_out,
)
from support.syndromes import SyndromeRounding, syndrome_arms
from torch import Tensor
from transformers import PreTrainedModel

from trace_lightning.models.policy import load_tokenizer
from trace_lightning.models.resolve import resolve_model_path
from trace_lightning.recipe import SITES, GuidanceConfig, QuantRecipe
from trace_lightning.rollout.microbatch import take
from trace_lightning.types import RolloutBatch

ROLLOUTS: dict[str, dict[str, Any]] = {
    "BF16": {},
    "W4A16KV4": {"weights": "nvfp4", "kv_cache": "nvfp4"},
    "W4A4KV4": {"weights": "nvfp4", "kv_cache": "nvfp4", "activations": "nvfp4"},
    "W4A16KV4 MXFP4": {"weights": "mxfp4", "kv_cache": "mxfp4"},
    "W4A4KV4 MXFP4": {"weights": "mxfp4", "kv_cache": "mxfp4", "activations": "mxfp4"},
}
MUSTS = {"W4A16KV4": 1.2, "W4A4KV4": 0.5}  # of the floor's maximum, for the arm `parity` without drift
MOST_MISMATCH = 0.01
SHORT = ("floor", "naive", "qat", "full", "parity", "syndrome", "six")  # arms under drift, and of the MXFP4 rollouts


def arms_of(formats: dict[str, Any], num_layers: int) -> list[Arm]:
    """All arms that one rollout format has."""
    if not formats:
        return [Arm("floor", quantised=False)]
    shipped = QuantRecipe(**formats, guidance=GuidanceConfig(mode="parity"))
    parity = replace(shipped.guidance, sites=list(shipped.guided_sites))
    full, every = replace(parity, mode="full"), [s for s in SITES if shipped.site_format(s) != "none"]
    arms = [
        Arm("naive", quantised=False),
        Arm("qat", replace(full, sites=every), AuditedNearest),
        Arm("scales", full, RolloutScales),
        Arm("full", full),
        Arm("parity", parity),
        Arm("parity_scales", replace(parity, scales="parity")),
        Arm("syndrome", replace(parity, mode="syndrome", scales="parity")),
        Arm("last_half", replace(parity, layers="last_half")),
        Arm("full_last_half", replace(full, layers="last_half")),
        Arm("last_three_quarters", replace(parity, layers=f"last:{max(1, num_layers - num_layers // 4)}")),
    ]
    if every != parity.sites:
        arms.append(Arm("six", replace(parity, sites=every)))
        arms += [Arm(f"six_without_{s}", replace(parity, sites=[o for o in every if o != s])) for s in every]
    return arms + [
        Arm(f"without_{s}", replace(parity, sites=[o for o in parity.sites or () if o != s]))
        for s in parity.sites or ()
    ]


def arms_to_run(args: argparse.Namespace, rollout: str, num_layers: int) -> list[Arm]:
    """The arms of `--arms`, else all but the syndromes, which run where they are named."""
    formats = ROLLOUTS[rollout]
    arms = [arm for arm in arms_of(formats, num_layers) if not args.arms or arm.name in args.arms]
    arms = [arm for arm in arms if arm.name in SHORT or "MXFP4" not in rollout]
    return arms + [arm for arm in syndromes_of(formats) if arm.name in (args.arms or ())]


def syndromes_of(formats: dict[str, Any]) -> list[Arm]:
    """Arms that record less than one bit per element, at the default sites and at all of them."""
    if not formats:
        return []
    shipped = QuantRecipe(**formats, guidance=GuidanceConfig(mode="parity"))
    default = replace(shipped.guidance, sites=list(shipped.guided_sites))
    return syndrome_arms(default, [site for site in SITES if shipped.site_format(site) != "none"])


def drifted(args: argparse.Namespace, source: PreTrainedModel, batch: RolloutBatch) -> dict[int, dict[str, Tensor]]:
    """Parameters after each of `args.drift` AdamW steps of -A log p, A normal per sequence, on <= 256 tokens each."""
    policy, device = copy.deepcopy(source), source.device
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.learning_rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(args.seed)
    micro, states = take(batch, list(range(len(batch.completions))), device), {}
    cut = int(micro.mask_BT.float().argmax(1).max()) + min(256, *args.lengths)
    micro = replace(micro, token_ids_BT=micro.token_ids_BT[:, :cut], mask_BT=micro.mask_BT[:, :cut], guidance=None)
    for step in range(max(args.drift) + 1):
        if step in args.drift:
            states[step] = {name: p.detach().clone() for name, p in policy.named_parameters()}
        advantages = torch.randn(len(micro.mask_BT), 1, generator=generator).to(device)
        with torch.autocast(device.type, torch.bfloat16):
            loss = -(advantages * log_probs(policy, micro, None)).sum() / micro.mask_BT.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    return states


@contextmanager
def weights(policy: PreTrainedModel, state: dict[str, Tensor]) -> Iterator[None]:
    """The policy with these weights, quantised once for all that is scored inside."""
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            parameter.copy_(state[name])
    qat: Any = policy.trace_qat
    with qat.cache_weights():
        yield


def study(args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Every row of the table: one rollout format after the other, the floor first."""
    states: dict[int, dict[str, Tensor]] = {}
    source = load_masters(args.model, device, args.seed)
    plain = make_trainer(args.model, QuantRecipe(), device)
    num_layers = len(plain.trace_qat.layout.layers)  # type: ignore[union-attr]
    for rollout in args.rollouts:
        formats = ROLLOUTS[rollout]
        arms = arms_to_run(args, rollout, num_layers)
        batch, speed = roll_out(args, source, full_record(formats, args.sequences))
        states = states or drifted(args, source, batch)
        quantised = make_trainer(args.model, QuantRecipe(**formats), device)
        for drift, state in states.items():
            with weights(plain, state), weights(quantised, state):
                for arm in [arm for arm in arms if drift == 0 or under_drift(arm)]:
                    policy = quantised if arm.quantised else plain
                    measured = measure(policy, batch, arm, args.lengths, device)
                    bytes_too = would_take(arm, batch, policy)
                    for length, values in measured.items():
                        names = {"rollout": rollout, "arm": arm.name, "drift": drift, "length": length}
                        yield {**names, **values, **bytes_too, "rollout_tokens_per_s": speed}


def under_drift(arm: Arm) -> bool:
    return arm.name in SHORT or issubclass(arm.rounding, SyndromeRounding)


def would_take(arm: Arm, batch: RolloutBatch, policy: Any) -> dict[str, float]:
    """What a record of these syndromes would take; of all rates the engine writes one (arm `syndrome`)."""
    if not issubclass(arm.rounding, SyndromeRounding):
        return {}
    assert batch.guidance is not None
    assert arm.guidance is not None
    record = restrict(batch.guidance, arm.guidance, policy.trace_qat.layout)
    return {"bytes_per_token": arm.rounding.bytes_per_token(record)}


COLUMNS = {
    "mean_abs_dlogp": ("mean", "9.5f", "nats"),
    "max_abs_dlogp": ("max", "8.4f", "nats"),
    "k3": ("k3", "9.6f", "nats"),
    "slope": ("slope", "9.1e", "nats per doubling"),
    "slope_low": ("from", "9.1e", "nats per doubling"),
    "slope_high": ("to", "9.1e", "nats per doubling"),
    "codes_before": ("before", "7.4f", "share of codes"),
    "codes_after": ("after", "7.4f", "share of codes"),
    "d_act_before": ("D bef", "7.4f", "relative D_act"),
    "d_act_after": ("D aft", "7.4f", "relative D_act"),
    "bytes_per_token": ("B/token", "8.0f", "bytes"),
}


def head() -> str:
    cells = [f"{title:>{int(form.split('.')[0])}s}" for title, form, _ in COLUMNS.values()]
    return f"{'rollout':15s} {'arm':20s} {'steps':>5s} {'tokens':>6s} " + " ".join(cells)


def line(row: dict[str, Any]) -> str:
    cells = [
        f"{row[name]:{form}}" if name in row else f"{'-':>{int(form.split('.')[0])}s}"
        for name, (_, form, _) in COLUMNS.items()
    ]
    return f"{row['rollout']:15s} {row['arm']:20s} {row['drift']:5d} {row['length']:6d} " + " ".join(cells)


def json_rows(table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`name, value, unit, must, ok` of every number; `must` and `ok` are null where nothing is promised."""
    floor = {row["length"]: row["max_abs_dlogp"] for row in table if row["arm"] == "floor" and row["drift"] == 0}
    rows = []
    for row in table:
        limits: dict[str, float] = {}
        if row["rollout"] in MUSTS and row["arm"] == "parity" and row["drift"] == 0:
            limits["codes_after"] = MOST_MISMATCH
            if row["length"] in floor:
                limits["max_abs_dlogp"] = MUSTS[row["rollout"]] * floor[row["length"]]
        where = f"{row['rollout']}/{row['arm']}/{row['drift']} steps/{row['length']} tokens"
        for name, (_, _, unit) in COLUMNS.items():
            if name in row:
                must, value = limits.get(name), row[name]
                ok = None if must is None else value <= must
                rows.append({"name": f"{where}/{name}", "value": value, "unit": unit, "must": must, "ok": ok})
    return rows


def plot(table: list[dict[str, Any]], path: str) -> None:
    """Mean gap over the position and over the trainer's steps, of the arms that are measured everywhere."""
    figure = Figure(figsize=(15, 9), dpi=100, layout="constrained")
    longest = max(row["length"] for row in table)
    shown = [row for row in table if row["length"] == longest and row["arm"] in SHORT and "MXFP4" not in row["rollout"]]
    for column, rollout in enumerate([name for name in MUSTS if any(row["rollout"] == name for row in shown)]):
        pair = [figure.add_subplot(2, 2, 1 + column), figure.add_subplot(2, 2, 3 + column)]
        for arm in SHORT:
            rows = [row for row in shown if row["arm"] == arm and row["rollout"] in ("BF16", rollout)]
            if rows:
                curve = rows[0]["positions"]
                pair[0].plot([p["first"] for p in curve], [p["mean_abs_dlogp"] for p in curve], "o-", label=arm)
                pair[1].plot([r["drift"] for r in rows], [r["mean_abs_dlogp"] for r in rows], "o-", label=arm)
        for axis, label in zip(pair, ("position in the completion", "optimizer steps of the trainer"), strict=True):
            axis.set_xscale("symlog" if "steps" in label else "log", base=2)
            axis.set_yscale("symlog", linthresh=1e-5)
            axis.set_ylim(bottom=-3e-6)
            axis.set(title=rollout, xlabel=label, ylabel="mean |Δ log p|")
            axis.grid(True, alpha=0.25)
            axis.legend(fontsize=8)
    figure.savefig(path)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="default: prepared:smollm2 if it is there, else builtin:tiny-qwen3")
    parser.add_argument("--prompts", nargs="+")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 2048], help="cut where the context ends")
    parser.add_argument("--drift", type=int, nargs="+", default=[0, 1, 4, 16], help="optimizer steps of the trainer")
    parser.add_argument("--learning_rate", type=float, default=2e-6, help="of those steps")
    parser.add_argument("--rollouts", nargs="+", choices=ROLLOUTS, default=list(ROLLOUTS))
    parser.add_argument("--arms", nargs="+", help="of the second column; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", help="write the numbers as rows of name, value, unit, must, ok")
    parser.add_argument("--plot", help="write a PNG")
    args = parser.parse_args()
    args.model = args.model or default_model()
    args.lengths = fitting(args)
    return args


def default_model() -> str:
    try:
        resolve_model_path("prepared:smollm2")
    except ValueError:
        return "builtin:tiny-qwen3"
    return "prepared:smollm2"


def fitting(args: argparse.Namespace) -> list[int]:
    """Lengths that the model's context holds beside the longest prompt; a longer one becomes what is left."""
    tokenizer = load_tokenizer(args.model)
    config = json.loads((resolve_model_path(args.model) / "config.json").read_text())
    longest = max(len(tokenizer(text)["input_ids"]) for text in prompt_texts(args, tokenizer))
    return sorted({min(length, config["max_position_embeddings"] - longest) for length in args.lengths})


def main() -> None:
    args = arguments()
    device, table = torch.device(args.device), []
    print(head())
    for row in study(args, device):
        table.append(row)
        print(line(row), flush=True)
    rows = json_rows(table)
    for row in rows:
        if row["must"] is not None:
            print(f"{'ok  ' if row['ok'] else 'FAIL'} {row['name']}: {row['value']:.4g}, must be <= {row['must']:.4g}")
    if args.json:
        where = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        settings = {name: value for name, value in vars(args).items() if name not in ("json", "plot")}
        content = {"args": settings, "device": where, "torch": torch.__version__, "rows": rows}
        with open(args.json, "w") as file:
            json.dump(content, file, indent=1)
    if args.plot:
        plot(table, args.plot)


if __name__ == "__main__":
    main()
