"""The probe on the embedded model: healthy, and with each fault that it must find, turn the verdict for and name."""

from __future__ import annotations

import html
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import faults
from trace_lightning.data import encode
from trace_lightning.models.policy import load_policy, load_tokenizer
from trace_lightning.probe.agreement import off_grid, policy_score
from trace_lightning.probe.page import page
from trace_lightning.probe.plan import ProbePlan, ProbeSettings, choose_formats
from trace_lightning.probe.run import ProbeResult, run_probe
from trace_lightning.probe.store import PartStore
from trace_lightning.probe.study import Study
from trace_lightning.probe.verdict import Finding
from trace_lightning.recipe import QuantRecipe
from trace_lightning.rollout.engine import LocalEngine
from trace_lightning.rollout.rewarding import Scorer
from trace_lightning.tasks import TwoDigitAddition
from trace_lightning.types import Prompt, SamplingParams

MODEL = "builtin:tiny-qwen3"


def make_study(
    *,
    target: str = "w4a4kv4",
    parts: str = "divergence",
    edit: Callable[[Any], None] = lambda policy: None,
    engine: Any = None,
    score: Any = policy_score,
    temperature: float = 1.0,
    new_tokens: int = 32,
    heldout: int = 0,
) -> Study:
    tokenizer = load_tokenizer(MODEL)
    settings = ProbeSettings(
        formats="bf16", target=target, trajectories=4, num_prompts=2, layer_tokens=128, parts=parts
    )
    formats, target = choose_formats(settings, QuantRecipe())
    task = TwoDigitAddition()

    def prompts(problems: Any, sign: int) -> list[Prompt]:
        return [Prompt(token_ids=encode(p, tokenizer), problem=p, uid=sign * i) for i, p in enumerate(problems, 1)]

    sampling = SamplingParams(max_new_tokens=new_tokens, temperature=temperature)
    source = off_grid(load_policy(MODEL, QuantRecipe(), dtype=torch.float32).eval(), 0)
    edit(source)
    plan = ProbePlan(
        model=MODEL,
        settings=settings,
        formats=formats,
        target=target,
        prompts=prompts(task.train_problems()[:2], 1),
        heldout=prompts(task.heldout_problems()[:heldout], -1),
        sampling=SamplingParams(**(vars(sampling) | {"ignore_eos": True})),
        eval_sampling=SamplingParams(max_new_tokens=6),
    )
    engine = engine or LocalEngine()
    scorer = Scorer(list(task.rewards())) if heldout else None
    return Study(plan=plan, source=source, tokenizer=tokenizer, engine=engine, scorer=scorer, score=score)


def run(study: Study, folder: Path) -> ProbeResult:
    return run_probe(study, PartStore(folder, "key"))


def cause(result: ProbeResult, code: str) -> Finding:
    """The finding, which has turned the verdict and is told in the report and its first lines."""
    assert result.verdict.exit_code == 2
    finding = next(finding for finding in result.verdict.findings if finding.code == code)
    assert finding.text in result.verdict.reasons
    top = page(result, {}, "").split("<h2>")[0]
    assert html.escape(finding.text) in top
    return finding


def test_a_healthy_model_goes_and_nothing_is_found(tmp_path: Path) -> None:
    result = run(make_study(parts="divergence,same_tokens,layers,sync", temperature=0.7), tmp_path)
    assert result.verdict.exit_code in (0, 1)
    assert [finding for finding in result.verdict.findings if finding.severity == "stop"] == []
    assert not result.recipe["changed"]
    arms = result.parts["divergence"]["w4a4kv4"]["arms"]
    assert set(arms) == {"naive", "qat", "guided", "full"}
    key = "rollout_corr/k3_kl"
    assert arms["guided"]["metrics"][key] < arms["naive"]["metrics"][key]
    assert set(result.parts["switches"]["w4a4kv4"]) == {"weights", "activations", "K", "V"}


def test_a_k_channel_is_named_and_another_cache_is_recommended(tmp_path: Path) -> None:
    study = make_study(target="w4a16kv4", parts="divergence,same_tokens,layers", edit=faults.scale_k_channel)
    result = run(study, tmp_path)
    finding = cause(result, "k_channel")
    assert finding.layers == (1,)
    assert "K channel 5 " in finding.text or "K channel 37 " in finding.text
    assert result.recipe["changed"]
    assert "kv_rotation: hadamard" in result.recipe["yaml"] or "kv_cache: fp8" in result.recipe["yaml"]
    errors = result.recipe["same_tokens_mean_abs_dlogp"]
    assert errors["recipe"] < errors["target"]


def test_weight_outliers_are_named_and_excluded(tmp_path: Path) -> None:
    study = make_study(target="w4a16kv4", parts="divergence,layers", edit=faults.plant_weight_outliers)
    result = run(study, tmp_path)
    finding = cause(result, "weight_outliers")
    assert finding.layers == (1,)
    assert "behind mlp_in" in finding.text
    assert "largest column is 6" in finding.text, "planted 60 times as large"
    assert "1\\.mlp\\.gate_proj" in result.recipe["yaml"]
    errors = result.recipe["same_tokens_mean_abs_dlogp"]
    assert errors["recipe"] < 0.7 * errors["target"]


@pytest.mark.parametrize("place", [(1, "mlp_in"), (0, "attn_in"), (0, "down_in")])
def test_a_site_with_a_wrong_scale_is_named(tmp_path: Path, place: tuple[int, str]) -> None:
    result = run(make_study(engine=faults.WrongScaleEngine(*place)), tmp_path)
    assert f"from layer {place[0]}, {place[1]} on" in cause(result, "site_scale").text


def test_a_trainer_that_ignores_the_temperature_is_named(tmp_path: Path) -> None:
    result = run(make_study(score=faults.score_at_temperature_one, temperature=0.6), tmp_path)
    assert "the trainer ignores the temperature" in cause(result, "temperature").text


def test_an_engine_that_reports_raw_log_probs_is_named(tmp_path: Path) -> None:
    result = run(make_study(engine=faults.RawLogprobsEngine(), temperature=0.6), tmp_path)
    assert "the rollout ignores the temperature" in cause(result, "temperature").text


def test_an_engine_one_version_behind_is_named(tmp_path: Path) -> None:
    result = run(make_study(parts="divergence,sync", engine=faults.StaleEngine()), tmp_path)
    assert "the engine is one version behind" in cause(result, "stale_engine").text


def test_a_version_that_is_not_the_synced_one_is_named(tmp_path: Path) -> None:
    result = run(make_study(engine=faults.ForgetfulEngine()), tmp_path)
    assert "policy version -1, not 0" in cause(result, "version").text
