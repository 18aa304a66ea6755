"""The GPU beside the CPU: equal bytes from the quantisers, equal log-probs in FP32, agreement under guidance."""

from __future__ import annotations

import copy

import pytest
import torch

from numerics import assert_bit_equal
from tiny import make_engine, make_policy, make_prompts
from trace_kernels import FP8, MXFP4, NVFP4
from trace_lightning.recipe import GuidanceConfig, QuantRecipe
from trace_lightning.rollout.base import Generation
from trace_lightning.rollout.microbatch import collate_rollout, take
from trace_lightning.rollout.scoring import score
from trace_lightning.types import Prompt, RolloutBatch, SamplingParams

pytestmark = pytest.mark.gpu
FORMATS = [NVFP4(), NVFP4(four_over_six=True), MXFP4(), FP8()]
W4A4KV4 = {"weights": "nvfp4", "activations": "nvfp4", "kv_cache": "nvfp4"}


@torch.no_grad()
def gaps(policy, prompts: list[Prompt], drawn: Generation, *, num_samples: int, guided: bool = False) -> torch.Tensor:
    """|log-prob of the trainer - of the rollout| of every drawn token."""
    batch = RolloutBatch(prompts=prompts, num_generations=num_samples, guidance=drawn.guidance if guided else None)
    collate_rollout(batch, drawn.completions, pad_token_id=0)
    batch.advantages_B = torch.zeros(len(drawn.completions))
    micro = take(batch, list(range(len(drawn.completions))), torch.device("cuda"))
    logprobs, _ = score(policy, micro, temperature=1.0)
    return (logprobs - micro.rollout_logprobs_BT)[micro.mask_BT].abs()


@pytest.mark.parametrize("fmt", FORMATS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantisers_give_the_cpu_s_bytes(fmt, dtype):
    x = torch.cat([torch.randn(512, 1024) * 10.0**k for k in (-3, 0, 3)]).to(dtype)
    x[::7, :64] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 8, dtype=dtype)
    on_cpu, on_gpu = fmt.quantize(x), fmt.quantize(x.cuda())
    for name in ("codes", "scale", "outer"):
        expected = getattr(on_cpu, name)
        if expected is not None:
            assert_bit_equal(getattr(on_gpu, name).cpu(), expected)
    assert_bit_equal(fmt.dequantize(on_gpu, dtype).cpu(), fmt.dequantize(on_cpu, dtype))


@pytest.mark.parametrize("fmt", [NVFP4(), MXFP4()], ids=repr)
def test_guided_rounding_gives_the_cpu_s_bytes(fmt):
    x = torch.randn(256, 512)
    q = fmt.quantize(x)
    noisy = x * (1 + 0.03 * torch.randn_like(x))
    expected = fmt.round_parity(noisy, q.scale, q.outer, q.codes & 1)
    outer = None if q.outer is None else q.outer.cuda()
    got = fmt.round_parity(noisy.cuda(), q.scale.cuda(), outer, (q.codes & 1).cuda())
    assert_bit_equal(got.codes.cpu(), expected.codes)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gpt2"])
def test_unquantised_engine_equals_the_policy(family):
    policy = make_policy(family, QuantRecipe()).cuda()
    prompts = make_prompts(3, 17, 31)
    drawn = make_engine(policy, QuantRecipe()).generate(prompts, SamplingParams(max_new_tokens=24), num_samples=2)
    assert gaps(policy, prompts, drawn, num_samples=2).max() < 1e-4


@pytest.mark.parametrize("formats", [W4A4KV4, {"weights": "nvfp4", "kv_cache": "nvfp4"}], ids=["W4A4KV4", "W4A16KV4"])
def test_guidance_brings_the_two_sides_together(formats):
    """BF16 arithmetic, different kernels: the guided trainer is never further away than the unguided one."""
    recipe = QuantRecipe(**formats, guidance=GuidanceConfig(mode="parity"))
    policy = make_policy("llama", recipe).cuda()
    prompts = make_prompts(9, 33)
    engine = make_engine(copy.deepcopy(policy), recipe, dtype=torch.bfloat16)
    drawn = engine.generate(prompts, SamplingParams(max_new_tokens=48), num_samples=4, record_guidance=True)
    with torch.autocast("cuda", torch.bfloat16):
        guided, unguided = (gaps(policy, prompts, drawn, num_samples=4, guided=g).mean() for g in (True, False))
    assert guided <= unguided
    assert guided < 0.05
