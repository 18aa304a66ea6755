"""Our losses and advantages against TRL's own code (extra `trl`; skipped without it).

TRL's trainers import the whole training stack (datasets, accelerate). Its loss does not need it: `_compute_loss` is
taken out of the installed source as it is, and runs on a stand-in that has only the attributes it reads.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import textwrap
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trace_lightning.rl import (
    CISPO,
    GRPO,
    GSPO,
    K3,
    PPO,
    RLOO,
    SAPO,
    DrGRPO,
    GlobalCounts,
    GroupAdvantage,
    LeaveOneOut,
    LossInputs,
    PolicyLoss,
    SoftOverlong,
)

SPEC = importlib.util.find_spec("trl")
pytestmark = pytest.mark.skipif(SPEC is None, reason="needs TRL: pip install --no-deps 'trl>=1.16'")
LIMIT = 9


@functools.cache
def read(file: str) -> tuple[str, ast.Module]:
    assert SPEC is not None
    assert SPEC.origin is not None
    text = (Path(SPEC.origin).parent / file).read_text()
    return text, ast.parse(text)


@functools.cache
def source_of(file: str, name: str) -> str:
    """The source of a function, method or class of an installed TRL file."""
    text, tree = read(file)
    (node,) = (n for n in ast.walk(tree) if getattr(n, "name", None) == name)
    return textwrap.dedent("\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno]))


def taken(file: str, *names: str) -> dict[str, Any]:
    space: dict[str, Any] = {"torch": torch}
    for name in names:
        exec(source_of(file, name), space)
    return space


def trl_loss(inputs: LossInputs, loss_type: str, *, level: str = "token", **settings: Any) -> Tensor:
    """What TRL makes of the same tensors, in one undivided batch on one process."""
    arguments = {"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1}
    arguments |= {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
    own = {"beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2, "entropy_coef": 0.0} | settings
    accelerator = SimpleNamespace(
        num_processes=1, sync_gradients=False, gather=lambda x: x, reduce=lambda x, reduction: x
    )
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (inputs.policy_logprobs_BT, inputs.entropy_BT, None),
        args=SimpleNamespace(**(arguments | {k: own.pop(k) for k in arguments if k in own})),
        loss_type=loss_type,
        importance_sampling_level=level,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=inputs.weights_BT is not None,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        max_completion_length=LIMIT,
        model=SimpleNamespace(training=True),
        accelerator=accelerator,
        _metrics={"train": defaultdict(list)},
        _entropy_bonus_enabled=own["entropy_coef"] != 0,
        use_adaptive_entropy=False,
        **own,
    )
    space = taken("trainer/utils.py", "nanmin", "nanmax")
    mask, ids = inputs.mask_BT.int(), torch.zeros(inputs.mask_BT.shape, dtype=torch.int64)
    batch = {"prompt_ids": ids, "prompt_mask": mask, "completion_ids": ids, "completion_mask": mask}
    batch |= {"advantages": inputs.advantages_B, "old_per_token_logps": inputs.old_logprobs_BT}
    batch |= {"ref_per_token_logps": inputs.ref_logprobs_BT, "num_items_in_batch": mask.sum()}
    batch |= {"importance_sampling_ratio": inputs.weights_BT}
    exec(source_of("trainer/grpo_trainer.py", "_compute_loss"), space)
    return space["_compute_loss"](trainer, None, batch)


def random_inputs(*, weights: bool) -> LossInputs:
    mask = torch.arange(7)[None] < torch.tensor([2, 7, 4, 5])[:, None]
    policy = (-torch.rand(mask.shape) * 3).requires_grad_()
    others = {
        name: policy.detach() + 0.2 * torch.randn(mask.shape)
        for name in ("old_logprobs_BT", "rollout_logprobs_BT", "ref_logprobs_BT")
    }
    return LossInputs(
        policy_logprobs_BT=policy,
        **others,
        entropy_BT=torch.rand(mask.shape),
        weights_BT=torch.rand(mask.shape) * 2 if weights else None,
        advantages_B=torch.tensor([1.0, -0.5, 0.7, -1.2]),
        mask_BT=mask,
        counts=GlobalCounts.from_mask(mask, LIMIT),
    )


CASES: list[tuple[PolicyLoss, str, dict[str, Any]]] = [
    (GRPO(), "grpo", {}),
    (GRPO(epsilon=0.1, epsilon_high=0.3, delta=1.4), "grpo", {"epsilon_low": 0.1, "epsilon_high": 0.3, "delta": 1.4}),
    (GRPO(beta=0.3), "grpo", {"beta": 0.3}),
    (GRPO(beta=0.3, kl=K3("ratio")), "grpo", {"beta": 0.3, "use_bias_correction_kl": True}),
    (GRPO(entropy_coef=0.1), "grpo", {"entropy_coef": 0.1}),
    (DrGRPO(beta=0.1, entropy_coef=0.2), "dr_grpo", {"beta": 0.1, "entropy_coef": 0.2}),
    (PPO(epsilon_high=0.28), "dapo", {"epsilon_high": 0.28}),
    (PPO(beta=0.2), "dapo", {"beta": 0.2}),
    (GSPO(epsilon=0.02, epsilon_high=0.04), "grpo", {"level": "sequence", "epsilon_low": 0.02, "epsilon_high": 0.04}),
    (
        GSPO(beta=0.2, epsilon=0.05),
        "grpo",
        {"level": "sequence", "beta": 0.2, "epsilon_low": 0.05, "epsilon_high": 4e-4},
    ),
    (CISPO(cap=1.1), "cispo", {"epsilon_high": 1.1}),
    (CISPO(cap=5.0, beta=0.1), "cispo", {"epsilon_high": 5.0, "beta": 0.1}),
    (SAPO(), "sapo", {}),
]


@pytest.mark.parametrize(("ours", "loss_type", "settings"), CASES, ids=str)
@pytest.mark.parametrize("weights", [False, True], ids=["", "weighted"])
def test_losses_and_their_gradients(ours: PolicyLoss, loss_type: str, settings: dict[str, Any], weights: bool) -> None:
    inputs = random_inputs(weights=weights)
    theirs, own = trl_loss(inputs, loss_type, **settings), ours(inputs).loss
    torch.testing.assert_close(own, theirs, atol=1e-6, rtol=1e-5)
    (wanted,) = torch.autograd.grad(theirs, inputs.policy_logprobs_BT)
    (got,) = torch.autograd.grad(own, inputs.policy_logprobs_BT)
    torch.testing.assert_close(got, wanted, atol=1e-7, rtol=1e-5)
    assert wanted.norm() > 0


def test_rloo() -> None:
    inputs = random_inputs(weights=False)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (inputs.policy_logprobs_BT, inputs.entropy_BT, None),
        aux_loss_enabled=False,
        epsilon_low=0.2,
        epsilon_high=0.2,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x),
        _metrics={"train": defaultdict(list)},
    )
    space = taken("trainer/utils.py", "nanmin", "nanmax")
    exec(source_of("trainer/rloo_trainer.py", "_compute_loss"), space)
    mask, ids = inputs.mask_BT.int(), torch.zeros(inputs.mask_BT.shape, dtype=torch.int64)
    batch = {"prompt_ids": ids, "prompt_mask": mask, "completion_ids": ids, "completion_mask": mask}
    batch |= {"advantages": inputs.advantages_B, "old_logps": (inputs.old_logprobs_BT * mask).sum(1)}
    theirs, own = space["_compute_loss"](trainer, None, batch), RLOO()(inputs).loss
    torch.testing.assert_close(own, theirs, atol=1e-6, rtol=1e-5)
    (wanted,) = torch.autograd.grad(theirs, inputs.policy_logprobs_BT)
    (got,) = torch.autograd.grad(own, inputs.policy_logprobs_BT)
    torch.testing.assert_close(got, wanted, atol=1e-7, rtol=1e-5)


def statement(file: str, start: str, end: str) -> str:
    """The lines of a TRL file from the one that begins with `start` to the one before `end`."""
    lines = read(file)[0].splitlines()
    first = next(i for i, line in enumerate(lines) if line.strip().startswith(start))
    last = next(i for i in range(first, len(lines)) if lines[i].strip().startswith(end))
    return textwrap.dedent("\n".join(lines[first:last]))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_advantages(scale: str) -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.5, 1.0], [0.0, float("nan"), 2.0, 1.0]])
    space = taken("trainer/utils.py", "nanstd") | {"rewards": rewards.flatten(), "num_generations": 4}
    space["self"] = SimpleNamespace(scale_rewards=scale)
    exec(statement("trainer/grpo_trainer.py", "mean_grouped_rewards = torch.nanmean", "is_std_zero"), space)
    with pytest.warns(UserWarning, match="not scored"):
        ours = GroupAdvantage(scale=scale)(rewards)  # type: ignore[arg-type]
    torch.testing.assert_close(ours.flatten(), space["advantages"].nan_to_num(0.0))


def test_leave_one_out_advantages() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.5, 1.0], [0.0, float("nan"), 2.0, 1.0]])
    space = {"torch": torch, "rewards": rewards.flatten(), "num_generations": 4}
    space |= taken("trainer/utils.py", "nanstd")
    exec(statement("trainer/rloo_trainer.py", "grouped_rewards = rewards.view", "# Normalize advantages"), space)
    with pytest.warns(UserWarning, match="not scored"):
        ours = LeaveOneOut()(rewards)
    torch.testing.assert_close(ours.flatten(), space["advantages"].nan_to_num(0.0))


@pytest.mark.parametrize(("limit", "cache"), [(100, 20), (8, 8), (10, 1)])
def test_soft_overlong_punishment(limit: int, cache: int) -> None:
    space: dict[str, Any] = {}
    exec(source_of("rewards/other_rewards.py", "_SoftOverlongPunishment"), space)
    lengths = list(range(limit + 3))
    theirs = space["_SoftOverlongPunishment"](limit, cache)(completion_ids=[[0] * n for n in lengths])
    ours = SoftOverlong(cache=cache)(torch.tensor([lengths]), torch.ones(1, len(lengths)), limit)
    torch.testing.assert_close(ours[0], torch.tensor(theirs, dtype=torch.float32))


def test_no_two_inputs_are_alike() -> None:
    """Every field of the inputs that a loss may read differs from the others, so a mix-up would show."""
    inputs = random_inputs(weights=True)
    tensors = [getattr(inputs, field.name) for field in dataclasses.fields(inputs)]
    tokens = [
        tensor for tensor in tensors if isinstance(tensor, Tensor) and tensor.ndim == 2 and tensor.dtype != torch.bool
    ]
    assert all(not torch.equal(a, b) for i, a in enumerate(tokens) for b in tokens[:i])
