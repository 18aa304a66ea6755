"""Norms, rotary embeddings and MLPs in one kernel each: the same model on a CPU, no worse than torch on a GPU."""

from __future__ import annotations

import copy
import importlib
import sys

import pytest
import torch
from torch import Tensor

from kernel_path import use_kernels
from numerics import assert_bit_equal, assert_no_worse_than_torch
from tiny import make_model
from trace_lightning.models.fused import FUSED_FAMILIES, FusedMLP, FusedRMSNorm, FusedRotary, fuse_modules
from trace_lightning.models.policy import set_gradient_checkpointing

IDS = torch.arange(3, 45).view(2, 21)


def values_and_gradients(model: torch.nn.Module, ids: Tensor, autocast: bool = False) -> dict[str, Tensor]:
    """Logits, and the gradient of every parameter, by name."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast):
        logits = model(ids).logits
    model.zero_grad()
    logits.float().log_softmax(-1)[..., 7].mean().backward()
    return {"logits": logits.detach(), **{name: p.grad for name, p in model.named_parameters()}}


@pytest.fixture(autouse=True)
def _as_transformers_has_it(monkeypatch):
    """`install_qat` of any test before may have patched a family for the process."""
    for family in FUSED_FAMILIES:
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        function = module.apply_rotary_pos_emb
        monkeypatch.setattr(module, "apply_rotary_pos_emb", getattr(function, "original", function))


def rotary_of(model: torch.nn.Module) -> object:
    return sys.modules[type(model).__module__].apply_rotary_pos_emb


@pytest.mark.parametrize("family", FUSED_FAMILIES)
def test_on_a_cpu_nothing_changes(family):
    model = make_model(family)
    before, names = values_and_gradients(model, IDS), list(model.state_dict())
    fuse_modules(model)
    assert list(model.state_dict()) == names
    assert isinstance(rotary_of(model), FusedRotary)
    kinds = {type(module) for module in model.modules() if type(module).__name__.endswith(("RMSNorm", "MLP"))}
    assert kinds == {FusedRMSNorm, FusedMLP}
    for name, value in values_and_gradients(copy.deepcopy(model), IDS).items():
        assert_bit_equal(value, before[name])


def test_parameters_are_shared_and_twice_is_once():
    model = make_model("qwen3")
    norm = model.model.layers[0].input_layernorm
    fuse_modules(model)
    fused, turn = model.model.layers[0].input_layernorm, rotary_of(model)
    assert fused.weight is norm.weight
    fuse_modules(model)
    assert model.model.layers[0].input_layernorm is fused
    assert rotary_of(model) is turn
    assert not isinstance(turn.original, FusedRotary)


def test_other_families_keep_their_own():
    model = make_model("gemma")
    fuse_modules(model)
    assert not any(isinstance(module, FusedRMSNorm) for module in model.modules())
    assert not isinstance(rotary_of(model), FusedRotary)


def test_code_of_its_own_stays():
    model = make_model("llama")
    own = type("OwnRMSNorm", (type(model.model.norm),), {"__module__": "modeling_own"})
    model.model.norm.__class__ = own
    fuse_modules(model)
    assert type(model.model.norm) is own
    assert isinstance(model.model.layers[0].input_layernorm, FusedRMSNorm)


def test_another_activation_keeps_its_mlp():
    model = make_model("llama", hidden_act="gelu")
    fuse_modules(model)
    assert not any(isinstance(module, FusedMLP) for module in model.modules())
    assert isinstance(model.model.norm, FusedRMSNorm)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_kernels_give_the_gradients_of_a_model(recompute, monkeypatch):
    """The path of a GPU, in the interpreter: no worse than torch's own FP32 gradients."""
    model = make_model("qwen3")
    exact = values_and_gradients(copy.deepcopy(model).double(), IDS)
    torchs = values_and_gradients(model, IDS)
    fuse_modules(model)
    set_gradient_checkpointing(model.train(), recompute)
    use_kernels(monkeypatch)
    for name, value in values_and_gradients(model, IDS).items():
        right = exact[name]
        assert_no_worse_than_torch(value, torchs[name], right, factor=4, floor=1e-6 * right.abs().max().item())


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16-mixed"])
@pytest.mark.parametrize("family", FUSED_FAMILIES)
def test_gpu_model_is_no_worse_than_torch(family, autocast, monkeypatch):
    ids = IDS.cuda()
    model = make_model(family, hidden_size=256, intermediate_size=512)
    exact = values_and_gradients(copy.deepcopy(model).double(), IDS)
    torchs = copy.deepcopy(model).cuda()
    fuse_modules(model)
    ours = values_and_gradients(model.cuda(), ids, autocast)
    monkeypatch.setattr(sys.modules[type(model).__module__], "apply_rotary_pos_emb", rotary_of(model).original)
    torchs = values_and_gradients(torchs, ids, autocast)
    for name, value in ours.items():
        right = exact[name]
        assert_no_worse_than_torch(
            value.cpu(), torchs[name].cpu(), right, factor=4, floor=1e-6 * right.abs().max().item()
        )
