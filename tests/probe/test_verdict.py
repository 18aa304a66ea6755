"""Bands, the decision and its exit code, and the recipe: on made-up numbers."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from trace_lightning.probe import advice
from trace_lightning.probe.bands import BANDS, grades, worst
from trace_lightning.probe.study import K3, MAX, MEAN
from trace_lightning.probe.verdict import Finding, judge, sensitive
from trace_lightning.recipe import GuidanceConfig, QuantRecipe

RECIPES = Path(__file__).parents[2] / "configs" / "recipes"
KL, ESS = "rollout_corr/kl", "rollout_corr/ess"


def arm(k3: float, slope: tuple[float, float, float] = (0.0, -1.0, 1.0), **metrics: float) -> dict[str, Any]:
    ends = dict(zip(("mean", "low", "high"), slope, strict=True))
    return {"metrics": {MEAN: 0.01, MAX: 0.1, K3: k3, **metrics}, "slope": ends, "sites": []}


def results(qat: float, guided: float | None) -> dict[str, Any]:
    arms = {"naive": arm(1.0), "qat": arm(qat)} | ({} if guided is None else {"guided": arm(guided)})
    outputs = {"repeats": [0.0] * 8, "broken": [0.0] * 8}
    part = {"sides": None, "version": [0, 0], "outputs": outputs}
    return {"divergence": {"bf16": part | {"arms": {"floor": arm(0.0005)}}, "x": part | {"arms": arms}}}


@pytest.mark.parametrize(
    ("qat", "guided", "decision", "code"),
    [
        (0.001, 0.001, "go", 0),
        (0.01, 0.001, "go with guidance", 1),
        (0.5, 0.01, "go with guidance", 1),
        (0.5, 0.02, "stay", 2),
        (0.01, None, "go", 0),
        (0.5, None, "stay", 2),
    ],
)
def test_the_decision(qat, guided, decision, code):
    verdict = judge(results(qat, guided), "x")
    assert (verdict.decision, verdict.exit_code) == (decision, code)
    assert verdict.reasons


def test_every_band_has_a_source_and_grades_in_order():
    assert all(band.source and (band.warn is not None or band.stop is not None) for band in BANDS)
    assert grades({K3: 0.0019, KL: -0.2, ESS: 0.2}) == {K3: "healthy", KL: "stop", ESS: "stop"}
    assert grades({K3: 0.0021, ESS: 0.9}) == {K3: "warn", ESS: "healthy"}
    assert grades({K3: math.nan}) == {K3: "stop"}
    assert worst({}) == "healthy"


def test_bf16_that_disagrees_stops_everything():
    found = results(0.001, 0.001)
    found["divergence"]["bf16"]["arms"]["floor"] = arm(0.5)
    verdict = judge(found, "x")
    assert verdict.decision == "stay"
    assert "BF16 against BF16" in verdict.reasons[0]


def test_what_bf16_itself_does_is_no_reason_against_a_format():
    found = results(0.0025, 0.0025)
    assert judge(found, "x").decision == "go with guidance"
    found["divergence"]["bf16"]["arms"]["floor"] = arm(0.0025)
    assert judge(found, "x").decision == "go"


def test_growth_along_the_answer_warns_only_beyond_the_floor():
    found = results(0.01, 0.001)
    found["divergence"]["x"]["arms"]["guided"] = arm(0.001, (0.02, 0.01, 0.03))
    assert "accumulates" not in {finding.code for finding in judge(found, "x").findings}
    found["divergence"]["bf16"]["arms"]["floor"] = arm(0.0005, (0.0, -0.001, 0.001))
    (finding,) = judge(found, "x").findings
    assert (finding.code, finding.severity) == ("accumulates", "warn")
    assert judge(found, "x").exit_code == 1


@pytest.mark.parametrize(("kept", "severity"), [(0.9, "warn"), (0.2, "stop")])
def test_reward_warns_when_it_falls_and_stops_when_little_is_left(kept, severity):
    found = results(0.001, 0.001)
    questions = [0.5, 0.75, 1.0, 0.75] * 8
    outputs = {"clipped": [0.0] * 32}
    found["quality"] = {
        "bf16": {"questions": questions, "outputs": outputs},
        "x": {"questions": [kept * q for q in questions], "outputs": outputs},
    }
    (finding,) = judge(found, "x").findings
    assert (finding.code, finding.severity) == ("reward", severity)
    same = copy.deepcopy(found)
    same["quality"]["x"] = same["quality"]["bf16"]
    assert judge(same, "x").findings == []


def test_loops_are_found_against_bf16():
    found = results(0.001, 0.001)
    found["divergence"]["x"]["outputs"] = {"repeats": [1.0] * 7 + [0.0], "broken": [0.0] * 8}
    (finding,) = judge(found, "x").findings
    assert (finding.code, finding.severity) == ("repeats", "warn")


def test_sensitive_layers_stand_out_from_the_median():
    rows = [{"layer": i, "solo_mean_abs_dlogp": value} for i, value in enumerate([0.1, 0.1, 0.1, 0.3, 0.11, 0.5])]
    assert sensitive(rows) == (3, 5)
    assert sensitive(rows[2:5]) == ()


@pytest.mark.parametrize("activations", ["none", "nvfp4"])
def test_a_cache_in_fp8_is_suggested_whatever_sites_are_guided(activations):
    sites = ["k", "v"] if activations == "none" else ["mlp_in", "k"]
    guidance = GuidanceConfig(mode="parity", sites=sites, store="host")
    recipe = QuantRecipe(weights="nvfp4", activations=activations, kv_cache="nvfp4", guidance=guidance)
    rotated, fp8 = advice.suggest(recipe, None, [Finding("k_channel", "stop", "")], [], 64)
    assert rotated.kv_rotation == "hadamard"
    assert rotated.guidance == guidance
    pasted = advice.guided(fp8, "go with guidance")
    assert (pasted.kv_cache, pasted.guidance.store) == ("fp8", "host")
    assert pasted.guidance.mode == ("none" if activations == "none" else "parity")
    assert [each.kv_cache for each in advice.suggest(recipe, None, [Finding("k_channel", "stop", "")], [], 40)] == [
        "fp8"
    ]


@pytest.mark.parametrize(("activations", "file"), [("none", "hopper_small"), ("nvfp4", "blackwell_small")])
def test_mild_rounding_is_that_of_the_shipped_recipes(activations, file):
    shipped = yaml.safe_load((RECIPES / f"{file}.yaml").read_text())
    shipped = QuantRecipe(**shipped | {"guidance": GuidanceConfig(**shipped["guidance"])})
    names = tuple(f"model.layers.0.self_attn.{leaf}_proj" for leaf in "qkv")
    layout = SimpleNamespace(groups=[SimpleNamespace(layer=0, site="attn_in", names=names)])
    guidance = GuidanceConfig(mode="parity", sites=["k"] if activations == "none" else ["attn_in", "o_in", "mlp_in"])
    recipe = QuantRecipe(weights="nvfp4", activations=activations, kv_cache="nvfp4", guidance=guidance)
    mild = advice.mildly(recipe, SimpleNamespace(layout=layout), 64)
    (pattern,) = mild.exclude
    assert all(re.search(pattern, name) and re.search(shipped.exclude[0], name) for name in names)
    assert not re.search(pattern, "model.layers.0.self_attn.o_proj")
    assert mild.guidance == GuidanceConfig(mode="parity"), "named sites would leave out what q, k and v feed"
    assert replace(mild, exclude=[], guidance=shipped.guidance) == replace(shipped, exclude=[])
    bare = SimpleNamespace(layout=SimpleNamespace(groups=[]))  # q, k and v are excluded already
    assert advice.mildly(mild, bare, 64) == mild
    assert advice.mildly(recipe, bare, 40).kv_rotation == "none"


def test_sensitive_layers_stay_in_bf16_at_an_end_and_by_name_inside():
    def group(layer):
        return SimpleNamespace(layer=layer, site="o_in", names=(f"model.layers.{layer}.self_attn.o_proj",))

    layers = range(6)
    qat = SimpleNamespace(layout=SimpleNamespace(layers=layers, groups=[group(i) for i in layers]))
    assert advice.kept_layers(qat, (0, 3, 4, 5)) == (["first:1", "last:3"], [])
    assert advice.kept_layers(qat, (2,)) == ([], [r"^model\.layers\.2\.self_attn\.o_proj$"])


def test_yaml_says_only_what_differs_from_the_defaults():
    recipe = advice.guided(QuantRecipe(weights="nvfp4", kv_cache="nvfp4", bf16_layers=["last:1"]), "stay")
    content = yaml.safe_load(advice.as_yaml(recipe))
    assert content == {
        "recipe": {
            **{"weights": "nvfp4", "activations": "none", "kv_cache": "nvfp4"},
            **{"guidance": {"mode": "parity", "sites": None}, "bf16_layers": ["last:1"]},
        }
    }
    settings = content["recipe"] | {"guidance": GuidanceConfig(**content["recipe"]["guidance"])}
    assert QuantRecipe(**settings) == recipe
    assert advice.guided(QuantRecipe(weights="nvfp4"), "stay").guidance.mode == "none"
