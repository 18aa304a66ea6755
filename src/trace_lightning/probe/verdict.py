"""From numbers to a decision: go, go with guidance, or stay; the reasons, and the causes that are named.

    go (0)                the unguided trainer agrees with the rollout within the healthy bands, or as BF16 does
    go with guidance (1)  it does not, and the guided one stays below every stop
    stay (2)              neither does, or a cause was found that should be removed first

A finding of severity `stop` keeps from going even where trainer and rollout agree: a K channel that drowns its block
damages both sides alike. A finding of severity `warn` is told and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trace_lightning.probe.bands import BANDS, GRADES, HEALTHY, STOP, WARN, grades, worst
from trace_lightning.probe.outputs import differences, interval, share
from trace_lightning.probe.study import K3, MAX, MEAN
from trace_lightning.recipe import SITES

GO, GUIDED, STAY = "go", "go with guidance", "stay"
EXIT_CODES = {GO: 0, GUIDED: 1, STAY: 2}
# Relative errors of one layer on its own inputs, and ratios. Measured where all is well, SmolLM2-135M and the embedded
# model in NVFP4: weights up to .11, columns up to 3.3 times the median one; K up to .27, channels up to 17 times.
WEIGHT_ERROR, K_ERROR, K_RATIO, WEIGHT_RATIO = 0.3, 0.12, 25.0, 10.0
SENSITIVE, FEWEST_LAYERS = 1.75, 4  # times the median solo error; of fewer layers a median says nothing
PARTED = 0.15  # relative D_act of nearest rounding at inputs that are guided upstream; where all is well up to .06


@dataclass(frozen=True)
class Finding:
    """One thing that was noticed: `code` for scripts, sentences for people, and what to do about it."""

    code: str
    severity: str
    text: str
    way_out: str = ""
    layers: tuple[int, ...] = ()


@dataclass
class Verdict:
    """The decision about one format, its reasons, and everything that was found."""

    format: str
    decision: str
    reasons: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """For scripts: 0 go, 1 go with guidance, 2 stay."""
        return EXIT_CODES[self.decision]


def judge(results: dict[str, Any], name: str) -> Verdict:
    """The verdict about the format `name`, from the parts that `run.run_probe` collects."""
    findings = [*about_sides(results), *about_sync(results), *about_sites(results, name)]
    findings += [*about_layers(results, name), *about_positions(results, name), *about_quality(results, name)]
    arms = results["divergence"][name]["arms"]
    floor = results["divergence"]["bf16"]["arms"]["floor"]
    unguided, guided = _grade(arms["qat"], floor), _grade(arms["guided"], floor) if "guided" in arms else None
    stops = [finding for finding in findings if finding.severity == STOP]
    verdict = Verdict(name, STAY, [finding.text for finding in stops], findings)
    if unguided == HEALTHY:
        decision, reason = GO, f"a trainer that rounds alike agrees with the rollout: {_numbers(arms['qat'])}"
    elif guided is not None and guided != STOP:
        decision = GUIDED
        reason = f"unguided, the sides differ ({_numbers(arms['qat'])}); guided they agree: {_numbers(arms['guided'])}"
    elif guided is None and unguided == WARN:
        decision, reason = GO, f"in the warning band, and this format has no guidance: {_numbers(arms['qat'])}"
    else:
        arm = arms["qat"] if guided is None else arms["guided"]
        decision, reason = STAY, f"trainer and rollout differ too much: {_numbers(arm)}{_over(arm)}"
    verdict.reasons.append(reason)
    verdict.decision = STAY if stops else decision
    return verdict


def _grade(arm: dict[str, Any], floor: dict[str, Any] | None = None) -> str:
    """The worst grade of an arm, over the metrics whose grade is worse than BF16's own."""
    base = {} if floor is None else grades(floor["metrics"])
    own = grades(arm["metrics"])
    return worst({k: grade for k, grade in own.items() if GRADES.index(grade) > GRADES.index(base.get(k, HEALTHY))})


def _numbers(arm: dict[str, Any]) -> str:
    return f"mean |Δ log p| {arm['metrics'][MEAN]:.4f}, max {arm['metrics'][MAX]:.2f}, k3 {arm['metrics'][K3]:.5f}"


def _over(arm: dict[str, Any]) -> str:
    marks = grades(arm["metrics"])
    return "".join(
        f"; {band.title} {arm['metrics'][band.key]:.4g} is beyond {band.stop:g} ({band.source})"
        for band in BANDS
        if marks.get(band.key) == STOP
    )


def about_sides(results: dict[str, Any]) -> Iterator[Finding]:
    """BF16 against BF16: is the floor a floor, and do both sides divide by the same temperature?"""
    floor = results["divergence"]["bf16"]
    for name, part in results["divergence"].items():
        if part["version"][0] != part["version"][1]:
            yield Finding(
                "version",
                STOP,
                f"completions of {name} say policy version {part['version'][1]}, not {part['version'][0]}",
            )
    sides = floor["sides"]
    if sides is not None:
        for side, other in (("trainer", "rollout"), ("rollout", "trainer")):
            if sides[f"{side}_one"] < 0.2 * sides[f"{side}_own"]:
                yield Finding(
                    "temperature",
                    STOP,
                    f"the {side} ignores the temperature: its log-probs are those of temperature 1 (mean difference "
                    f"{sides[f'{side}_one']:.4f}), not of {sides['temperature']:g} ({sides[f'{side}_own']:.4f}), which "
                    f"the {other} uses",
                    "divide the logits by the sampling temperature before the log-softmax, on both sides",
                )
    if _grade(floor["arms"]["floor"]) == STOP:
        arm = floor["arms"]["floor"]
        yield Finding(
            "floor",
            STOP,
            f"BF16 against BF16 differs too much already: {_numbers(arm)}{_over(arm)}",
            "look for the cause in BF16 first: it will be worse in 4 bits",
        )


def about_sync(results: dict[str, Any]) -> Iterator[Finding]:
    """Does the engine draw from the weights that it was given last?"""
    sync = results.get("sync")
    if sync is None:
        return
    if sync["new"] > 2 * sync["old"]:
        yield Finding(
            "stale_engine",
            STOP,
            f"the engine is one version behind: after a sync its tokens have the log-probs of the weights before it "
            f"(mean |Δ log p| {sync['old']:.4f} to the old, {sync['new']:.4f} to the new ones)",
            "see that load_weights copies the weights it is given before the version moves on",
        )
    elif sync["version"] != sync["expected_version"]:
        yield Finding("version", STOP, f"the engine reports version {sync['version']} after a sync of version 2")


def about_sites(results: dict[str, Any], name: str) -> Iterator[Finding]:
    """Where the two sides part although everything before was guided: scales or formats that are not the same."""
    arm = results["divergence"][name]["arms"].get("full")
    if arm is None:
        return
    order = sorted(arm["sites"], key=lambda row: (row["layer"], _ORDER.index(row["site"])))
    parted = [row for row in order if row.get("d_act_rel_before", 0.0) > PARTED]
    if not parted:
        return
    first, most = parted[0], max(parted, key=lambda row: row["d_act_rel_before"])
    place = f"layer {first['layer']}, {first['site']}"
    yield Finding(
        "site_scale",
        STOP,
        f"the two sides round differently from {place} on: at equal inputs the values differ by "
        f"{first['d_act_rel_before']:.0%} there (relative D_act; most at layer {most['layer']}, {most['site']}: "
        f"{most['d_act_rel_before']:.0%}). Either this site has a wrong scale on one side, or what feeds it does",
        f"compare scale and format of {place}, and of the site before it, in engine and trainer",
        (first["layer"],),
    )


_ORDER = ("attn_in", "k", "v", "o_in", "mlp_in", "down_in")
assert set(_ORDER) == set(SITES)


def about_layers(results: dict[str, Any], name: str) -> Iterator[Finding]:
    """K channels and weights that no block scale can serve, with the layers they are in."""
    for row in results.get("layers", {}).get(name, []):
        errors, layer, channel = row["errors"], row["layer"], row.get("k_channel")
        error = errors.get("attention_k", 0.0)
        if channel is not None and error > K_ERROR and channel["ratio"] > K_RATIO:
            yield Finding(
                "k_channel",
                STOP,
                f"layer {layer}: K channel {channel['channel']} of KV head {channel['head']} is {channel['ratio']:.0f} "
                f"times the median channel, so that its block's scale drowns the others: rounding K changes the output "
                f"of attention by {error:.0%}",
                "the recipe below is what served best of recipe.kv_rotation=hadamard and recipe.kv_cache=fp8",
                (layer,),
            )
        for site in ("attn_in", "o_in", "mlp_in", "down_in"):
            error, ratio = errors.get(f"w:{site}", 0.0), row["weight_outliers"].get(site, 0.0)
            if error > WEIGHT_ERROR:
                outlier = f"their largest column is {ratio:.0f} times the median one"
                why = outlier if ratio > WEIGHT_RATIO else "no column stands out"
                yield Finding(
                    "weight_outliers",
                    STOP,
                    f"layer {layer}: rounding the weights behind {site} changes their output by {error:.0%} ({why})",
                    f"recipe.exclude keeps the linears of layer {layer} behind {site} in BF16",
                    (layer,),
                )
    layers = sensitive(results.get("layers", {}).get(name, []))
    if layers:
        yield Finding(
            "sensitive_layers",
            WARN,
            f"quantised alone, layers {', '.join(map(str, layers))} change more than {SENSITIVE:g} times what the "
            "median layer does",
            "the recipe below keeps them in BF16 where that helps",
            layers,
        )


def sensitive(rows: list[dict[str, Any]]) -> tuple[int, ...]:
    """Layers whose solo error stands out; empty for models of a few layers."""
    solo = sorted(row["solo_mean_abs_dlogp"] for row in rows)
    if len(solo) < FEWEST_LAYERS:
        return ()
    bar = SENSITIVE * solo[len(solo) // 2]
    return tuple(row["layer"] for row in rows if row["solo_mean_abs_dlogp"] > bar)


def about_positions(results: dict[str, Any], name: str) -> Iterator[Finding]:
    """Does the gap, or the error of the format, grow along the answer, and by which part?"""
    arms, floor = results["divergence"][name]["arms"], results["divergence"]["bf16"]["arms"]["floor"]
    arm = arms.get("guided", arms["qat"])
    label = "guided" if "guided" in arms else "unguided"
    if arm["slope"] and arm["slope"]["low"] > max(0.0, (floor["slope"] or {"high": 0.0})["high"]):
        slope = arm["slope"]
        yield Finding(
            "accumulates",
            WARN,
            f"the gap of the {label} trainer grows along the answer, by {slope['mean']:.2g} nats per doubling (95 %: "
            f"{slope['low']:.2g} to {slope['high']:.2g}), more than BF16's",
            "probe with the length you train at; guide all six sites if it leaves the bands",
        )
    parts = results.get("switches", {}).get(name, {})
    growing = {part: row["slope"] for part, row in parts.items() if row["slope"] and row["slope"]["low"] > 0}
    if growing:
        part = max(growing, key=lambda key: growing[key]["mean"])
        slope = growing[part]
        yield Finding(
            "accumulates_in",
            WARN,
            f"on the same tokens the format's error grows along the answer, most by {part}: {slope['mean']:.2g} nats "
            f"per doubling (95 %: {slope['low']:.2g} to {slope['high']:.2g})",
        )


def about_quality(results: dict[str, Any], name: str) -> Iterator[Finding]:
    """Rewards, loops and garble against BF16, with intervals."""
    quality = results.get("quality", {})
    if name in quality and "bf16" in quality:
        before, after = quality["bf16"]["questions"], quality[name]["questions"]
        base, change = interval(before), interval(differences(after, before))
        if base and change and change["high"] < 0:
            much = change["high"] < -0.5 * base["mean"]
            yield Finding(
                "reward",
                STOP if much else WARN,
                f"reward of held-out problems: {base['mean']:.3f} in BF16, {change['mean']:+.3f} in {name} (95 %: "
                f"{change['low']:+.3f} to {change['high']:+.3f})",
                "training recovers a part of this; if little reward is left there is nothing to learn from"
                + (". The recipe below rounds more mildly if that helps" if much else ""),
            )
        yield from _more_often("clipped", "held-out answers", "are cut at the limit", quality, name)
    yield from _more_often("repeats", "long answers", "end in a loop", results["divergence"], name)
    yield from _more_often("broken", "long answers", "hold characters that are no text", results["divergence"], name)


def _more_often(key: str, whose: str, what: str, parts: dict[str, Any], name: str) -> Iterator[Finding]:
    """A warning where the share of BF16 and that of the format have intervals apart, by a tenth at least."""
    own, base = (share(parts[which]["outputs"][key]) for which in (name, "bf16"))
    if own and base and own["low"] > base["high"] and own["mean"] > base["mean"] + 0.1:
        yield Finding(key, WARN, f"{own['mean']:.0%} of the {whose} in {name} {what}, {base['mean']:.0%} in BF16")
