"""Which way each number format takes on a device, in plain words, and what that gains.

native     the tensor cores multiply FP4 themselves
unpacked   FP4 is read from memory and unpacked in registers: bytes are saved, arithmetic is BF16
emulated   torch computes the same numbers: nothing is saved, everything is right
"""

from __future__ import annotations

import torch

from trace_kernels.native import native_supported
from trace_lightning.recipe import FP4, QuantRecipe

NATIVE, UNPACKED, EMULATED, PLAIN, COPIED = "native", "unpacked", "emulated", "plain", "BF16 copy"


def paths(recipe: QuantRecipe, device: torch.device, *, fused: bool = True) -> dict[str, str]:
    """The path of weights, activations and KV cache; `fused`: the engine's own decoder knows the model."""
    on_gpu = device.type == "cuda" and fused
    fp4 = UNPACKED if on_gpu else EMULATED
    return {
        "weights": fp4 if recipe.weights in FP4 else COPIED if recipe.weights == "fp8" else PLAIN,
        "activations": EMULATED if recipe.activations != "none" else PLAIN,
        "kv_cache": PLAIN if recipe.kv_cache == "none" else fp4,
    }


def in_words(device: torch.device) -> list[str]:
    """What FP4 can gain on this device."""
    if device.type != "cuda":
        return [
            "CPU: every format is emulated by torch, so speeds here say nothing about a GPU. Numbers are those that a "
            "GPU computes, up to the order of sums; the trainer's linears imitate another kernel."
        ]
    name, (major, minor) = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if native_supported(device):
        return [
            f"{name} (sm_{major}{minor}): its tensor cores take FP4. The native kernels are compiled for it but not "
            "verified on hardware, so the engine unpacks FP4 to BF16 here as on older cards, and gains from bytes.",
        ]
    return [
        f"{name} (sm_{major}{minor}) has no FP4 tensor cores. FP4 weights and K/V are unpacked in registers: decoding, "
        "which waits for memory, gains from fewer bytes, and more sequences fit. Arithmetic stays BF16.",
        "FP4 activations gain nothing on this card: they are rounded and multiplied in BF16, and cost guidance. "
        "W4A16KV4 is the format for it; W4A4 is for training a policy that will be served in W4A4.",
    ]
