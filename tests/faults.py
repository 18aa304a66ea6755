"""Faults planted into a model, an engine or a trainer, each such that BF16 hardly notices, or nobody would."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trace_kernels.quantize import NVFP4
from trace_lightning.models.policy import final_hidden, logits_head
from trace_lightning.probe.agreement import policy_score
from trace_lightning.rl.logprobs import token_logprobs
from trace_lightning.rollout.engine import LocalEngine


@torch.no_grad()
def scale_k_channel(policy: Any, layer: int = 1, channel: int = 5, factor: float = 50.0) -> None:
    """One K channel is `factor` times as large, its query as much smaller: scores stay the same in high precision.

    RoPE mixes the channel with the one half a head away, so that one is scaled alike.
    """
    attention = policy.model.layers[layer].self_attn
    for index in (channel, channel + attention.head_dim // 2):
        attention.k_norm.weight[index] *= factor
        attention.q_norm.weight[index] /= factor


@torch.no_grad()
def plant_weight_outliers(policy: Any, layer: int = 1, factor: float = 60.0) -> None:
    """Every 16th column of gate and up is `factor` times as large, and its input as much smaller."""
    block = policy.model.layers[layer]
    block.post_attention_layernorm.weight[::16] /= factor
    for linear in (block.mlp.gate_proj, block.mlp.up_proj):
        linear.weight[:, ::16] *= factor


class TooSmallScale(NVFP4):
    """NVFP4 with the block scale of values an eighth as large: what does not fit is clipped."""

    def scale_bytes(self, x_blocks: Tensor, outer: Tensor | None) -> Tensor:
        return super().scale_bytes(x_blocks / 8, outer)


class WrongScaleEngine(LocalEngine):
    """One activation site rounds by a wrong scale."""

    def __init__(self, layer: int = 1, site: str = "mlp_in") -> None:
        super().__init__(decoder="hf", verify=False)
        self.place = layer, site

    def _build(self) -> None:
        super()._build()
        for group in self.decoder.model.trace_qat.groups:
            if (group.layer, group.site) == self.place and group.activations is not None:
                group.activations = TooSmallScale()


class StaleEngine(LocalEngine):
    """`load_weights` takes over what it was given the time before, and reports the new version."""

    _given: dict[str, Tensor] | None = None

    def load_weights(self, weights: Any, *, version: int) -> None:
        new = {name: tensor.detach().clone() for name, tensor in weights}
        super().load_weights((self._given or new).items(), version=version)
        self._given = new


class ForgetfulEngine(LocalEngine):
    """Completions carry the version of the sync before."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        drawn = super().generate(*args, **kwargs)
        drawn.completions = [replace(c, policy_version=c.policy_version - 1) for c in drawn.completions]
        return drawn


class RawLogprobsEngine(LocalEngine):
    """Draws at the temperature and reports log-probs of the raw logits."""

    @torch.no_grad()
    def generate(self, prompts: Any, params: Any, **kwargs: Any) -> Any:
        drawn = super().generate(prompts, params, **kwargs)
        samples = len(drawn.completions) // len(prompts)
        for index, completion in enumerate(drawn.completions):
            start = len(prompts[index // samples].token_ids)
            ids = torch.tensor(prompts[index // samples].token_ids + completion.token_ids)
            with torch.autocast("cpu", torch.bfloat16):
                hidden = final_hidden(self._policy, ids[None, :-1])[0, start - 1 :]
                values, _ = token_logprobs(hidden, logits_head(self._policy), ids[start:], temperature=1.0)
            completion.logprobs = values.tolist()
        return drawn


def score_at_temperature_one(policy: Any, micro: Any, temperature: float, rounding: Any) -> Tensor:
    """A trainer that forgot to divide its logits."""
    return policy_score(policy, micro, 1.0, rounding)
