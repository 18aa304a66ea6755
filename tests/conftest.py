"""One thread, no network, tiny random models. Tests mirror `src` and `kernels`; numerics.py has the assertions."""

from __future__ import annotations

import os

# With several OpenMP threads a model of this size is about 20 times slower than with one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run in Python on CPU tensors; before triton is imported

torch.set_num_threads(1)

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


def pytest_configure() -> None:
    """Say at once what would look like a broken kernel."""
    from importlib.metadata import version

    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    if os.environ.get("TRITON_INTERPRET") == "1" and triton < (3, 7) and numpy >= (2, 4):
        raise pytest.UsageError("the interpreter of triton 3.6 does not work with numpy 2.4: install numpy<2.4")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what the machine cannot run, and say what is missing."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        needed = 2 if item.get_closest_marker("multi_gpu") else 1 if item.get_closest_marker("gpu") else 0
        if gpus < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), found {gpus}"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def make_tiny_model(family: str, *, seed: int = 0, **overrides: Any) -> nn.Module:
    """A random Hugging Face causal LM in FP32 and eval mode: 2 layers, hidden 64, 4 heads over 2 KV heads.

    `initializer_range` is 0.1, not the usual 0.02: logits then spread by about 1, so that a wrong temperature or a
    missing layer shows. `overrides` go to the config of the family.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "head_dim": 32 if family == "qwen3" else 16,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": None,
    }
    if family == "mistral":
        settings["sliding_window"] = None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(family, **(settings | overrides))
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture
def tiny_model() -> Callable[..., nn.Module]:
    """The factory `make_tiny_model(family, *, seed=0, **config_overrides)`."""
    return make_tiny_model


@pytest.fixture(params=FAMILIES)
def any_tiny_model(request: pytest.FixtureRequest) -> nn.Module:
    """One tiny model of every supported family in turn."""
    return make_tiny_model(request.param)
