"""`trace-fit env`: what a bug report needs, and no secret."""

from __future__ import annotations

import importlib.metadata
import json

import pytest
import torch

from trace_lightning import env

TORCH = importlib.metadata.version("torch")  # torch.__version__ may add its build


def test_the_report_names_versions_paths_and_extras(capsys):
    env.main([])
    text = capsys.readouterr().out
    assert f"torch: {TORCH}" in text
    assert "rollout kernels: " in text
    assert "pip install 'trace-lightning[" in text or "math: math-verify" in text


def test_json_holds_the_same(capsys):
    env.main(["--json"])
    content = json.loads(capsys.readouterr().out)
    assert content["versions"]["torch"] == TORCH
    assert {row["component"] for row in content["components"]} >= {"FP4 weights", "FP4 KV cache", "native FP4 matmul"}


def test_secrets_are_not_shown(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = env.variables()
    assert found["HF_TOKEN"] == "(set)"
    assert found["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("capability", "kernels", "native"),
    [((7, 5), "not supported", None), ((9, 0), "triton", "no FP4 tensor cores"), ((10, 0), "triton", "not verified")],
)
def test_what_a_card_gets(monkeypatch, capability, kernels, native):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    rows = {name: (path, why) for name, path, why in env.components(torch.device("cuda"))}
    assert rows["rollout kernels"][0] == kernels
    assert ("native FP4 matmul" in rows) is (native is not None)
    if native is not None:
        assert native in rows["native FP4 matmul"][1]
