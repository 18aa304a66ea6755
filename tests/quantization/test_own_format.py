"""A user's number format: both sides round by it, and what it cannot be used for is refused."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tiny import Scorer, make_engine, make_policy, make_prompts, rollout_logprobs, sampling
from trace_kernels import NVFP4, get_format, is_registered, quantize, register_format
from trace_lightning.recipe import QuantRecipe

_PATH = Path(__file__).parents[2] / "examples" / "custom_format.py"


@pytest.fixture
def int4(monkeypatch):
    """The format of the example, registered for one test."""
    spec = importlib.util.spec_from_file_location("custom_format", _PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(quantize, "_OWN", {})
    register_format(module.INT4())
    return module.INT4


def test_a_recipe_finds_it_by_name(int4) -> None:
    assert get_format("int4") == int4()
    assert is_registered("int4")
    assert not is_registered("nvfp4")
    register_format(int4())  # a notebook runs its cells again
    with pytest.raises(ValueError, match=r"unknown number format 'int5'; choose one of none, .*int4"):
        get_format("int5")


@pytest.mark.parametrize("width", [32, 33, 7])
def test_rounding_it_twice_changes_nothing_and_errs_by_half_a_step(int4, width: int) -> None:
    x = torch.randn(5, width)
    once = int4().dequantize(int4().quantize(x))
    twice = int4().dequantize(int4().quantize(once))
    torch.testing.assert_close(twice, once, rtol=1e-3, atol=0)
    assert ((once - x).abs() <= 0.51 * x.abs().amax(-1, keepdim=True) / 7).all()


def test_trainer_and_rollout_round_alike(int4) -> None:
    recipe = QuantRecipe(weights="int4", activations="int4")
    policy, plain = make_policy("qwen3", recipe), make_policy("qwen3", QuantRecipe())
    prompts = make_prompts(9, 5)
    generation = make_engine(policy, recipe).generate(prompts, sampling(), num_samples=2)
    scorer = Scorer(prompts, generation, 2)
    rolled = rollout_logprobs(generation)
    torch.testing.assert_close(scorer.logprobs(policy, 0.8), rolled, atol=1e-4, rtol=0)
    assert (scorer.logprobs(plain, 0.8) - rolled).abs().max() > 0.05  # it does round


@pytest.mark.parametrize("name", ["nvfp4", "none"])
def test_names_of_ours_are_taken(int4, name: str) -> None:
    other = type("Other", (int4,), {"name": name})
    with pytest.raises(ValueError, match=f"the format name '{name}' is taken"):
        register_format(other())


def test_another_format_under_the_same_name_and_guidance_are_refused(int4) -> None:
    with pytest.raises(ValueError, match="'int4' is taken"):
        register_format(type("Another", (int4,), {"name": "int4"})())
    with pytest.raises(ValueError, match="guided rounding is defined for our E2M1 formats alone"):
        register_format(type("Guided", (int4,), {"name": "int4g", "guidable": True})())
    assert NVFP4().guidable


@pytest.mark.parametrize(
    ("recipe", "settings", "message"),
    [
        (
            QuantRecipe(weights="int4"),
            {"decoder": "fused"},
            "engine.decoder=fused knows our formats alone, not int4: use auto",
        ),
        (QuantRecipe(kv_cache="int4"), {}, "recipe.kv_cache=int4: pages have codes of our own formats only"),
    ],
    ids=["fused", "cache"],
)
def test_where_it_cannot_run_is_said(int4, recipe, settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        make_engine(make_policy("qwen3", replace(recipe, kv_cache="none")), recipe, **settings)
