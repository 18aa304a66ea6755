"""Arguments to plain data and back; near matches of names."""

from __future__ import annotations

import argparse

import jsonargparse
import pytest

from trace_lightning.hparams import from_plain, to_plain
from trace_lightning.recipe import GuidanceConfig, QuantRecipe
from trace_lightning.rl import GRPO, PolicyLoss
from trace_lightning.suggestions import did_you_mean, plain, vocabulary
from trace_lightning.types import TurnLimits


def test_round_trip_of_nested_configs():
    recipe = QuantRecipe(weights="nvfp4", kv_cache="mxfp4", guidance=GuidanceConfig(mode="full", sites=["k"]))
    plain = to_plain([recipe, GRPO(epsilon=0.1), None, (0.9, 0.95)])
    assert from_plain(plain) == [recipe, GRPO(epsilon=0.1), None, [0.9, 0.95]]
    assert from_plain(recipe) is recipe


def test_checkpoints_that_name_the_recipe_by_its_first_module_open():
    guidance = {"class_path": "trace_lightning.types.GuidanceConfig", "init_args": {"mode": "parity"}}
    stored = {
        "class_path": "trace_lightning.types.QuantRecipe",
        "init_args": {"kv_cache": "nvfp4", "guidance": guidance},
    }
    assert from_plain(stored) == QuantRecipe(kv_cache="nvfp4", guidance=GuidanceConfig(mode="parity"))


def test_what_cannot_be_rebuilt_is_refused():
    with pytest.raises(ValueError, match="frozen dataclass"):
        to_plain(object())
    with pytest.raises(ValueError, match=r"no\.such\.Loss"):
        from_plain({"class_path": "no.such.Loss"})


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("unrecognized arguments: --recipe.kv_cash x", ["recipe.kv_cache"]),
        ("Expected a dot import path string: GRPOO", ["GRPO"]),
        ("Option 'epsilom' is not accepted", ["epsilon"]),
        ("nothing is like this at all", []),
    ],
)
def test_near_matches(message, expected):
    parser = argparse.ArgumentParser()
    verbs = parser.add_subparsers()
    verbs.add_parser("fit").add_argument("--recipe.kv_cache")
    assert did_you_mean(message, vocabulary(parser, (PolicyLoss,)))[:1] == expected


def test_a_value_that_may_be_null_is_refused_in_its_own_words():
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--turns", type=TurnLimits | None)
    with pytest.raises(jsonargparse.ArgumentError) as typo:
        parser.parse_args(["--turns.max_turn=3"])
    assert "NoneType" in str(typo.value)
    assert plain(str(typo.value)) == "Parser key \"turns\":\n  Option 'max_turn' is not accepted"
    assert plain("anything else") == "anything else"
