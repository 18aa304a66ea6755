"""The frozen reference of a KL term: a second copy of the model that scores rollouts and is never trained.

It belongs to nobody's `state_dict`: `ReferencePolicy` is no `nn.Module`, so checkpoints and the optimizer see the
policy alone, and a resumed run loads the reference from the same place again.

Beside trained FP32 masters it computes as the policy does under BF16 autocast, cast for cast (FP32 residual stream), so
the KL of an unquantised policy begins at 0. It rounds nothing, whatever `model.recipe` says: under FP4 the KL begins
with what rounding costs, and pulls towards the model as it was released. Rounding it too would not make it 0: without
guidance FP4 turns the smallest difference into other codes, and the record would mislead weights that did not draw.

    bf16    2 bytes per parameter
    fp8     linears in E4M3 with one scale per row (torchao), 1 byte; multiplied in BF16. Embeddings and head stay BF16.

A policy with adapters brings its reference along: its own base, adapters off, nothing rounded but the base itself. No
second copy is loaded then, unless `path` names another model.

Every rank holds a whole copy. What was left out: moving it to the host between steps, and a reference that follows the
policy (TRL's `sync_ref_model`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trace_lightning.models.policy import load_policy
from trace_lightning.quantization.lora import lora_state
from trace_lightning.quantization.qat import QATState
from trace_lightning.recipe import QuantRecipe
from trace_lightning.rollout.microbatch import MicroBatch
from trace_lightning.rollout.scoring import score


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """Where the reference comes from and how it is kept.

    Args:
        path: the model, as in `model.path`; None takes that one: the policy before training.
        dtype: `bf16` or `fp8`.
    """

    path: str | None = None
    dtype: Literal["bf16", "fp8"] = "bf16"

    def __post_init__(self) -> None:
        if self.dtype not in ("bf16", "fp8"):
            raise ValueError(f"model.reference.dtype={self.dtype!r}: expected bf16 or fp8")


class ReferencePolicy:
    """Loads the reference once and gives its log-probs."""

    def __init__(self, config: ReferenceConfig, policy_path: str, attention: str) -> None:
        self.config, self.path, self.attention = config, config.path or policy_path, attention
        self.model: PreTrainedModel | None = None
        self._adapted: PreTrainedModel | None = None  # the policy, whose base is the reference
        self._mixed = False

    def load(self, policy: PreTrainedModel, device: torch.device) -> None:
        """Load it onto `device`, unless it is there.

        Raises:
            ValueError: no model at the path, or one with another vocabulary than the policy's.
        """
        if self.model is not None:
            return
        if self.config.path is None and lora_state(policy) is not None:
            self._adapted = policy
            return
        model = load_policy(self.path, QuantRecipe(), dtype=torch.bfloat16, attention=self.attention)
        ours, theirs = policy.config.vocab_size, model.config.vocab_size
        if ours != theirs:
            raise ValueError(
                f"model.reference.path={self.path} has a vocabulary of {theirs} tokens, the policy one of {ours}: "
                "log-probs of the same ids would belong to different words"
            )
        model.requires_grad_(False).eval().to(device)  # type: ignore[arg-type]
        self._mixed = policy.get_input_embeddings().weight.dtype == torch.float32
        if self._mixed:
            _widen_residual(model)
        if self.config.dtype == "fp8":
            _keep_in_fp8(model)
        self.model = model

    @torch.no_grad()
    def score(self, micro: MicroBatch, *, temperature: float) -> Tensor:
        """FP32 log-probs [B, T] of the masked tokens under the rollout's temperature and support, 0 elsewhere."""
        if self._adapted is not None:
            lora, qat = lora_state(self._adapted), self._adapted.trace_qat
            assert lora is not None
            assert isinstance(qat, QATState)
            with lora.off(), qat.unquantized():
                return score(self._adapted, micro.unguided(), temperature=temperature)[0]
        assert self.model is not None, "load() comes first"
        with torch.autocast(micro.token_ids_BT.device.type, torch.bfloat16, enabled=self._mixed):
            logprobs_BT, _ = score(self.model, micro.unguided(), temperature=temperature)
        return logprobs_BT


def _widen_residual(model: PreTrainedModel) -> None:
    """FP32 between the layers, as in a policy with FP32 masters, while matrices stay in BF16 for autocast."""
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms and biases
            parameter.data = parameter.data.float()
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: output.float())


def _keep_in_fp8(model: PreTrainedModel) -> None:
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    head = model.get_output_embeddings()

    def chosen(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and module is not head

    quantize_(model, Float8WeightOnlyConfig(), filter_fn=chosen)
