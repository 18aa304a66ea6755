"""Bad input ends with exit code 2 and one message that names what is wrong, before anything long has started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trace_lightning.cli import main

FP4 = str(Path(__file__).parent.parent / "configs" / "grpo_fp4.yaml")
CASES = {
    "unknown option": ("--recipe.kv_cash mxfp4", ["recipe.kv_cash", "recipe.kv_cache"]),
    "unknown class": ("--model.loss GRPOO", ["GRPOO", "Did you mean: GRPO"]),
    "unknown task": ("--data.task TwoDigitAdditon", ["TwoDigitAdditon", "TwoDigitAddition"]),
    "unknown argument of a class": ("--model.loss GRPO --model.loss.epsilom 3", ["epsilom", "Did you mean: epsilon"]),
    "unknown format": ("--recipe.weights int4", ["recipe.weights", "nvfp4", "int4"]),
    "missing model": ("--model.path nowhere/at/all", ["nowhere/at/all", "builtin:tiny-qwen3"]),
    "unknown builtin": ("--model.path builtin:tiny-qwen", ["builtin:tiny-qwen3"]),
    "guidance without QAT": ("--recipe.trainer bf16", ["recipe.trainer=bf16", "recipe.trainer=qat"]),
    "guidance without rounded activations": (
        "--recipe.trainer qat_weights",
        ["recipe.trainer=qat_weights does not round activations", "recipe.trainer=qat"],
    ),
    "residual of nothing": (
        "--recipe.residual_share 0.5 --recipe.activations none",
        ["recipe.residual_share=0.5", "recipe.activations=nvfp4"],
    ),
    "residual under guidance": ("--recipe.residual_share 0.5", ["recipe.residual_share=0.5", "guidance.mode=none"]),
    "share out of range": ("--recipe.residual_share 2", ["recipe.residual_share=2.0", "[0, 1]"]),
    "loss without its record": ("--model.loss ScoreCentering --model.corrections []", ["sampling.record_logprobs"]),
    "ratio counted twice": ("--model.loss TBPO", ["model.loss=TBPO", "tis_token", "model.corrections=[]"]),
    "ratio counted twice in bypass mode": (
        "--model.bypass_mode true",
        ["bypass_mode=true", "tis_token", "corrections=[]"],
    ),
    "a KL estimator that is none": (
        "--model.loss GRPO --model.loss.beta 0.1 --model.loss.kl K33",
        ["K33", '"kl"'],
    ),
    "unknown penalty": ("--model.length_penalty SoftOverlon", ["SoftOverlon", "Did you mean: SoftOverlong"]),
    "no such reference": (
        "--model.loss GRPO --model.loss.beta 0.1 --model.reference.path nowhere/at/all",
        ["nowhere/at/all", "builtin:tiny-qwen3"],
    ),
    "a penalty on every answer": (
        "--model.length_penalty SoftOverlong --model.length_penalty.cache 90",
        ["cache=90", "6 tokens", "rollout.sampling.max_new_tokens"],
    ),
    "refills of groups of one": (
        "--rollout.dynamic_sampling.max_refills 1 --rollout.num_generations 1 --model.advantages BatchAdvantage",
        ["groups of one never do", "num_generations"],
    ),
    "refills without weights": (
        "--rollout.dynamic_sampling.max_refills 1 --rollout.engine LocalEngine --rollout.engine.keep_snapshot false",
        ["engine.keep_snapshot=false", "dynamic_sampling to null"],
    ),
    "rollouts far ahead": ("--rollout.max_version_diff 2", ["rollout.max_version_diff=2", "one snapshot"]),
    "rollouts ahead without weights": (
        "--rollout.max_version_diff 1 --rollout.engine LocalEngine --rollout.engine.keep_snapshot false",
        ["rollout.max_version_diff=1", "engine.keep_snapshot=false", "max_version_diff to 0"],
    ),
    "refills beside a curriculum": (
        "--rollout.dynamic_sampling.max_refills 1 --data.order SuccessCurriculum",
        ["data.order=SuccessCurriculum", "use one of the two"],
    ),
    "no refills": ("--rollout.dynamic_sampling.max_refills 0", ["max_refills=0", "null switches"]),
    "record of truncated sampling": (
        "--rollout.sampling.record_logprobs 8 --rollout.sampling.top_p 0.9",
        ["record_logprobs=8", "top_p=0.9", "top_p=1"],
    ),
    "guided site not quantised": ("--recipe.guidance.sites [k] --recipe.kv_cache none", ["'k'", "recipe.kv_cache"]),
    "guided layers": ("--recipe.guidance.layers half", ["guidance.layers='half'", "last_half"]),
    "one generation": ("--rollout.num_generations 1", ["rollout.num_generations"]),
    "truncated sampling": ("--rollout.sampling.top_p 0.9", ["top_p=0.9", "record_support"]),
    "context": ("--rollout.sampling.max_new_tokens 4000", ["max_new_tokens=4000", "128 tokens"]),
    "exclude": ("--recipe.exclude [q_porj]", ["q_porj", "match no module", "did you mean q_proj"]),
    "no layer left": (
        "--recipe.bf16_layers [first:3] --recipe.guidance.mode none",
        ["recipe.bf16_layers=['first:3']", "none of the 2 layers"],
    ),
    "nothing left to guide": (
        "--recipe.guidance.sites [down_in] --recipe.exclude [down_proj]",
        ["guidance covers down_in", "Widen guidance.layers or guidance.sites"],
    ),
    "adapters on nothing": ("--model.lora.target_modules [q_porj]", ["'q_porj' matches no module", "mean q_proj"]),
    "split group": ("--recipe.exclude [q_proj]", ["fused group", "exclude all of its linears or none"]),
    "unknown attention": ("--model.attention sdpaa", ["'sdpaa'", "sdpa"]),
    "attention not installed": ("--model.attention flash_attention_2", ["flash-attn", "trace-lightning[flash-attn]"]),
    "batch larger than the data": ("--data.batch_size 100000", ["training prompts", "100000"]),
    "unknown reward": ("--rollout.rewards [ExactMach]", ["ExactMach", "Did you mean: ExactMatch"]),
    "reward function that is not there": (
        "--rollout.rewards [own_rewards.lenght]",
        ["rollout.rewards", "module 'own_rewards' has no attribute 'lenght'"],
    ),
    "argument before its class": (
        "--data.task.path x.jsonl --data.task JsonlTask",
        ["data.task", "TwoDigitAddition", "'path' is not accepted"],
    ),
    "missing file": ("--data.task JsonlTask --data.task.path nowhere.jsonl", ["nowhere.jsonl: no such file"]),
    "unknown order": ("--data.order SuccesCurriculum", ["SuccesCurriculum", "Did you mean: SuccessCurriculum"]),
    "curriculum of one task": ("--data.order SuccessCurriculum", ["training prompt 0 has none", "Mixture"]),
    "reward that is no number": ("--rollout.rewards [own_rewards.listed]", ["'listed', row", "a list of 2"]),
    "reward of another length": (
        "--rollout.rewards.class_path BatchFunctionReward --rollout.rewards.function own_rewards.too_few",
        ["'too_few', rows 0 to", "completions"],
    ),
    "no time for rewards": (
        "--rollout.rewards [own_rewards.length] --rollout.reward_time_limit 0",
        ["rollout.reward_time_limit=0"],
    ),
    "chat switch without a template": (
        '--data.chat_template_kwargs {"enable_thinking":false}',
        ["chat_template_kwargs", "no chat template"],
    ),
    "more passes than completions": (
        '--data.eval_sets [{"name":"a","pass_at":[4]}]',
        ["pass_at has 4", "num_generations=4"],
    ),
    "nothing guided": (
        "--recipe.activations none --recipe.kv_cache fp8",
        ["nothing can be guided", "guidance.mode=none"],
    ),
}


OF_THE_MODELS_STRUCTURE = (
    *("exclude", "no layer left", "nothing left to guide", "adapters on nothing", "split group"),
    *("unknown attention", "attention not installed"),
)


@pytest.mark.parametrize("name", CASES)
def test_bad_input(name, tmp_path, monkeypatch, capsys):
    arguments, wanted = CASES[name]
    monkeypatch.delenv("TRACE_LIGHTNING_DEBUG", raising=False)
    common = ["fit", "--config", FP4, "--runs_dir", str(tmp_path), "--trainer.num_sanity_val_steps", "0"]
    common += ["--trainer.max_steps", "1", "--data.heldout_size", "4"]
    monkeypatch.setattr(sys, "argv", ["trace-fit", *common, *arguments.split()])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    for text in wanted:
        assert text in message
    assert "Traceback" not in message
    if name in OF_THE_MODELS_STRUCTURE:
        assert not list(tmp_path.iterdir())


def test_a_missing_verb_lists_the_verbs(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["trace-fit"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "fit" in capsys.readouterr().err


def test_a_mistyped_verb_finds_those_beside_lightnings(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["trace-fit", "raport", "runs"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert "bench, estimate, probe, report" in message
    assert "Did you mean: report?" in message


def test_the_prepare_verb_knows_its_models(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["trace-fit", "prepare", "llama"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "smollm2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "wanted"),
    [
        ("hopper", "recipe.trainer. A file of number formats, such as configs/recipes/hopper.yaml, is no --config"),
        ("weights: nvfp4", "give it as --recipe FILE, behind --config configs/grpo_fp4.yaml"),
        ("grpo", "comes behind one: --config configs/grpo_fp4.yaml --config RECIPE.yaml"),
    ],
)
def test_a_recipe_without_a_config_says_where_it_belongs(recipe, wanted, tmp_path, monkeypatch, capsys):
    path = Path(FP4).parent / "recipes" / f"{recipe}.yaml"
    if ":" in recipe:
        path = tmp_path / "formats.yaml"
        path.write_text(recipe)
    monkeypatch.setattr(sys, "argv", ["trace-fit", "fit", "--config", str(path)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert wanted in message
    assert "Did you mean" not in message
