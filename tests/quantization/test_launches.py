"""How many operators the trainer's rounding adds: on a GPU each is a launch, and small models wait for launches."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tiny import Scorer, make_engine, make_policy, make_prompts, sampling
from trace_lightning.quantization.rounding import GuidedRounding
from trace_lightning.recipe import GuidanceConfig, QuantRecipe

FP4: dict[str, Any] = {"weights": "nvfp4", "kv_cache": "nvfp4"}
W4A16KV4 = QuantRecipe(**FP4, guidance=GuidanceConfig(mode="parity"))
W4A4KV4 = QuantRecipe(**FP4, activations="nvfp4", guidance=GuidanceConfig(mode="parity"))
LAYERS = 2


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def of_microbatches(recipe: QuantRecipe) -> list[Counter[str]]:
    """Operators of forward and backward, in the first and second micro-batch of an optimizer step."""
    policy, prompts = make_policy("qwen3", recipe), make_prompts(5, 17, 31)
    record = make_engine(policy, recipe).generate(prompts, sampling(), record_guidance=recipe.guidance.mode != "none")
    scorer, found = Scorer(prompts, record, 1), []
    with torch.autocast("cpu", torch.bfloat16), policy.trace_qat.cache_weights():
        for _ in range(2):
            context = {"trace_ctx": GuidedRounding(scorer.guidance())} if record.guidance else {}
            with Operators() as operators:
                policy(scorer.token_ids(), **context).logits.float().logsumexp(-1).sum().backward()
            found.append(operators.counts)
    return found


@pytest.mark.parametrize(("recipe", "sites", "guided"), [(W4A16KV4, 2, 2), (W4A4KV4, 6, 3)], ids=["W4A16", "W4A4"])
def test_a_site_is_one_kernel_and_a_weight_is_rounded_once_a_step(recipe: QuantRecipe, sites: int, guided: int) -> None:
    plain = of_microbatches(QuantRecipe())
    first, second = of_microbatches(recipe)
    assert first["trace_kernels.round_values.default"] == LAYERS * (sites + 7)
    assert second["trace_kernels.round_values.default"] == LAYERS * sites
    added = (second - plain[1]).total() - (plain[1] - second).total()
    # An audit is three, with its sums in FP64; K and V are laid out anew for attention.
    assert added <= LAYERS * (sites + 3 * guided + 4), (second - plain[1]).most_common(20)
