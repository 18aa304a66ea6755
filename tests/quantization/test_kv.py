"""Outer scales of K and V come from the weights alone, and no token ever exceeds them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tiny import make_model
from trace_kernels import NVFP4, get_format
from trace_kernels.hadamard import rotate
from trace_lightning.models.layout import attention_module, find_decoder_layers
from trace_lightning.models.policy import final_hidden
from trace_lightning.quantization.kv import FALLBACK_OUTER, KVWeights, kv_outer_scales
from trace_lightning.quantization.qat import install_qat
from trace_lightning.quantization.rounding import NearestRounding
from trace_lightning.recipe import QuantRecipe


class Witness(NearestRounding):
    """Remembers the largest |K| or |V| against what its outer scale can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.used: dict[tuple[int, str], float] = {}

    def values(self, layer: int, site: str, x: Tensor, fmt: Any, outer: Tensor | None = None) -> Any:
        if site not in ("k", "v"):
            return super().values(layer, site, x, fmt, outer)
        assert outer is not None
        share = (x.abs().amax((0, 2)) / (outer.squeeze(-1) * 448 * 6)).max().item()
        self.used[layer, site] = max(share, self.used.get((layer, site), 0.0))
        return super().values(layer, site, x, fmt, outer)


def scales_of(model: Any, fmt: str = "nvfp4", *, rotated: bool = False) -> Tensor:
    """Outer scales of all layers, [layers, 2, heads, 1]."""
    rows = []
    for layer in find_decoder_layers(model)[1]:
        weights = KVWeights.of(attention_module(layer), getattr(layer, "input_layernorm", None))  # type: ignore[arg-type]
        heads = model.config.num_key_value_heads
        found = kv_outer_scales(weights, heads, get_format(fmt), rotated=rotated, device=torch.device("cpu"))  # type: ignore[arg-type]
        rows.append(torch.stack(found))  # type: ignore[arg-type]
    return torch.stack(rows)


# gemma multiplies by 1 + weight, phi has a LayerNorm with bias, olmoe normalises K over all heads.
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma", "phi", "olmoe"])
@pytest.mark.parametrize("rotation", ["none", "hadamard"])
@pytest.mark.parametrize("linears", ["none", "nvfp4"])
@pytest.mark.parametrize("scale", [0.05, 1.0, 20.0])
def test_nothing_exceeds_the_bound(family: str, rotation: Any, linears: Any, scale: float) -> None:
    model = make_model(family)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # norm gains and biases anywhere, not near 1 and 0
            parameter.data = scale * torch.randn_like(parameter)
        elif "embed" not in name:
            parameter.data *= scale
    install_qat(model, QuantRecipe(weights=linears, activations=linears, kv_cache="nvfp4", kv_rotation=rotation))
    witness = Witness()
    with torch.no_grad():
        final_hidden(model, torch.randint(0, 128, (4, 64)), witness)
    assert len(witness.used) == 4
    for key, share in witness.used.items():
        assert share <= 1, f"{key} is clipped"
        assert share >= 2.0**-9, f"{key}: a bound so loose underflows small blocks"


@pytest.mark.parametrize("fmt", ["nvfp4", "fp8"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_scales_follow_the_weights(family: str, fmt: str) -> None:
    """Weights x 8, scales x 8."""
    model = make_model(family)
    before = scales_of(model, fmt)
    for layer in model.model.layers:
        for name, parameter in layer.self_attn.named_parameters():
            if name.startswith(("k_proj", "v_proj")):
                parameter.data *= 8
    assert torch.equal(scales_of(model, fmt), 8 * before)


def test_qk_norm_decides_over_k() -> None:
    model = make_model("qwen3")
    before = scales_of(model)
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.data *= 8
    assert torch.equal(scales_of(model), before)
    for layer in model.model.layers:
        layer.self_attn.k_norm.weight.data *= 8
    assert torch.equal(scales_of(model)[:, 0], 8 * before[:, 0])
    assert torch.equal(scales_of(model)[:, 1], before[:, 1])


@pytest.mark.parametrize("rotated", [False, True])
def test_scales_are_powers_of_two(rotated: bool) -> None:
    scales = scales_of(make_model("qwen2"), rotated=rotated)
    assert scales.dtype == torch.float32
    assert torch.equal(torch.frexp(scales).mantissa, torch.full_like(scales, 0.5))


def test_a_power_of_two_changes_no_value() -> None:
    """Why a loose bound costs nothing, as long as block scales do not leave their range."""
    x, fmt = torch.randn(64, 2, 32), NVFP4()
    values = [fmt.dequantize(fmt.quantize(x, torch.full((2, 1), 2.0**e))) for e in (-9, -7, -5)]
    assert torch.equal(values[0], values[1])
    assert torch.equal(values[0], values[2])


def test_scales_are_per_head() -> None:
    model = make_model("llama")
    before = scales_of(model)
    model.model.layers[0].self_attn.v_proj.weight.data[:16] *= 4  # head 0
    after = scales_of(model)
    assert after[0, 1, 0] == 4 * before[0, 1, 0]
    after[0, 1, 0] = before[0, 1, 0]
    assert torch.equal(after, before)


def test_unreadable_attention_falls_back() -> None:
    layer = find_decoder_layers(make_model("gpt2"))[1][0]
    assert KVWeights.of(attention_module(layer), None) is None  # type: ignore[arg-type]
    llama = make_model("llama").model.layers[0].self_attn
    assert KVWeights.of(llama, None) is None, "without its norm, nothing bounds the input"
    k, v = kv_outer_scales(None, 3, NVFP4(), rotated=False, device=torch.device("cpu"))
    assert torch.equal(k, torch.full((3, 1), FALLBACK_OUTER))  # type: ignore[arg-type]
    assert torch.equal(v, torch.full((3, 1), FALLBACK_OUTER))  # type: ignore[arg-type]


class TestRotation:
    def test_is_orthonormal_and_its_own_inverse(self) -> None:
        h = rotate(torch.eye(16))
        assert torch.equal(h, h.T)
        assert torch.equal(h.abs(), torch.full((16, 16), 0.25))
        assert torch.equal(h @ h, torch.eye(16))

    def test_leaves_scores_and_lengths_unchanged(self) -> None:
        q, k = torch.randn(5, 4, 48), torch.randn(5, 4, 48)
        assert (rotate(q) * rotate(k)).sum(-1) == pytest.approx((q * k).sum(-1), abs=1e-4)
        assert rotate(q).norm(dim=-1) == pytest.approx(q.norm(dim=-1), rel=1e-5)

    def test_spreads_an_outlier_over_its_block_only(self) -> None:
        x = torch.zeros(48)
        x[20] = 8.0
        rotated = rotate(x)
        assert torch.equal(rotated.abs(), torch.tensor([0.0, 2.0, 0.0]).repeat_interleave(16))

    def test_refuses_head_dims_that_are_no_whole_blocks(self) -> None:
        model = make_model("qwen3", head_dim=24)
        with pytest.raises(ValueError, match="head dim divisible by 16"):
            install_qat(model, QuantRecipe(kv_cache="nvfp4", kv_rotation="hadamard"))
