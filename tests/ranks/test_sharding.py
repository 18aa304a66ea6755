"""The snapshot of a sharded policy: the same bytes as of a whole one, built with one layer in full at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tiny
from ranks import launch, worker
from trace_lightning.models.sharding import Weights, as_forward, is_sharded, original_class


@pytest.mark.parametrize(
    ("family", "decoder"), [("qwen3", "fused"), ("llama", "fused"), ("qwen2", "fused"), ("mixtral", "hf")]
)
def test_snapshot_is_that_of_one_process(tmp_path, family: str, decoder: str) -> None:
    """Tied and untied heads, biases, QK-norms, stacked experts; every byte of the snapshot on both ranks."""
    launch.run(worker.snapshot, 2, tmp_path, tmp_path, family, decoder)
    for rank in (0, 1):
        counts = torch.load(tmp_path / f"snapshot_{rank}.pt")
        assert counts == {"layers": 2, "most": 1, "after": 0}


def test_outer_scales_of_shards_are_those_of_whole_weights(tmp_path) -> None:
    """The largest value may lie on either rank, and a rank may have no row at all."""
    launch.run(worker.peaks, 2, tmp_path, tmp_path)
    assert [torch.load(tmp_path / f"peaks_{rank}.pt").tolist() for rank in (0, 1)] == [[3.0, 7.0, 5.0]] * 2


def test_a_plain_policy_is_one_part() -> None:
    model = tiny.make_model("llama")
    (part,) = Weights(model).parts()
    assert part.keys() == dict(model.named_parameters()).keys()
    assert all(part[name].data_ptr() == parameter.data_ptr() for name, parameter in model.named_parameters())
    assert dict(Weights(model)).keys() == part.keys()
    assert not is_sharded(model)
    assert original_class(model) is type(model)


def test_as_forward_leaves_a_plain_model_alone() -> None:
    model, hooks = nn.Linear(2, 2), []
    model.register_forward_hook(lambda *args: hooks.append(args))
    assert as_forward(model, lambda x: x + 1, 2) == 3
    assert not hooks
    assert "forward" not in vars(model)


def test_nothing_adds_up_over_ten_steps(tmp_path) -> None:
    """On both ranks: an old snapshot, gathered layer or record that stays alive would be a tensor more at each step."""
    launch.run(worker.ten_steps, 2, tmp_path, tmp_path, "ddp", "fsdp2")
    for path in (tmp_path / f"{kind}_{rank}.pt" for kind in ("ddp", "fsdp2") for rank in (0, 1)):
        counts = torch.load(path)
        assert len(counts) == 10
        assert counts[-1] <= counts[4], path.name
