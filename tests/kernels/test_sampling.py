"""Sampling on the device: the tokens and log-probs of the torch reference, for every kind of truncation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from numerics import assert_bit_equal, assert_no_worse_than_torch
from trace_kernels import sampling
from trace_kernels.sampling import (
    counter_uniform,
    sample_tokens,
    sample_tokens_reference,
    sample_tokens_triton,
)
from trace_kernels.truncation import thresholds, truncation_threshold

FULL = (-1, 1.0, 0.0)
TRUNCATIONS = [
    pytest.param((5, 1.0, 0.0), id="top_k"),
    pytest.param((-1, 0.8, 0.0), id="top_p"),
    pytest.param((-1, 1.0, 0.1), id="min_p"),
    pytest.param((40, 0.9, 0.02), id="all"),
]
SEED = torch.tensor([2**40 + 7])


@pytest.fixture(autouse=True)
def _small_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks from a small vocabulary; real ones on a GPU."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(sampling, "_CHUNK", 128)
        monkeypatch.setattr("trace_kernels.truncation._ROW_BLOCK", 512)


def counters(rows: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """The extremes of int64 among them."""
    uid = torch.randint(-(2**62), 2**62, (rows,))
    uid[:2] = torch.tensor([2**63 - 1, -(2**63)])[:rows]
    return uid.to(device), torch.arange(rows, device=device), 1000 - torch.arange(rows, device=device)


def both(logits: Tensor, temperature: float, truncation: tuple[int, float, float]) -> tuple[Any, Any]:
    device = str(logits.device)
    arguments = (logits, *counters(len(logits), device), SEED.to(device), temperature, *truncation)
    return sample_tokens_triton(*arguments), sample_tokens_reference(*arguments)


def check(logits: Tensor, temperature: float, truncation: tuple[int, float, float]) -> None:
    """The same tokens; log-probs no worse than those of torch in FP32."""
    (tokens, logprobs), (expected, torch_logprobs) = both(logits, temperature, truncation)
    assert_bit_equal(tokens, expected)
    exact = logits.double()
    if temperature:
        exact = exact / temperature
        least = truncation_threshold(logits, temperature, *truncation)
        exact = exact.masked_fill(logits.float() < least, -torch.inf)
    reference = exact.log_softmax(-1).gather(-1, expected[:, None]).squeeze(-1)
    assert_no_worse_than_torch(logprobs, torch_logprobs, reference, floor=2e-6)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("vocabulary", [5, 128, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_full_distribution(dtype: torch.dtype, vocabulary: int, temperature: float) -> None:
    check((3 * torch.randn(4, vocabulary)).to(dtype), temperature, FULL)


@pytest.mark.parametrize("truncation", TRUNCATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_truncated(dtype: torch.dtype, truncation: tuple[int, float, float]) -> None:
    logits = (3 * torch.randn(2, 600) - 4).to(dtype)
    check(logits, 0.8, truncation)
    kept = logits.float() >= thresholds(logits, 0.8, *truncation)[:, None]
    assert torch.equal(kept, logits.float() >= truncation_threshold(logits, 0.8, *truncation))
    assert kept.sum(-1).min() >= 1
    assert kept.sum(-1).max() < 100


def test_ties_with_the_last_token_kept_stay() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0], [-1.0, -3.0, -2.0, -2.0, 0.0, -0.0]])
    for truncation, kept in (((2, 1.0, 0.0), [4, 2]), ((-1, 0.5, 0.0), [4, 2]), ((4, 1.0, 0.0), [4, 5])):
        reference = logits >= truncation_threshold(logits, 1.0, *truncation)
        assert (logits >= thresholds(logits, 1.0, *truncation)[:, None]).sum(-1).tolist() == kept
        assert reference.sum(-1).tolist() == kept


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    logits = torch.zeros(2, 500)
    logits[0, [133, 400]] = 2.0
    (tokens, _), (expected, _) = both(logits, 0.0, FULL)
    assert tokens.tolist() == expected.tolist() == [133, 0]


@triton.jit
def zero(SEED, UID, SAMPLE, POSITION, row_1):
    return tl.full((1,), 0.0, tl.float64)


@triton.jit
def almost_one(SEED, UID, SAMPLE, POSITION, row_1):
    return tl.full((1,), 0.9999999999999999, tl.float64)


@pytest.mark.parametrize("uniform", [zero, almost_one], ids=["zero", "almost_one"])
@pytest.mark.parametrize("truncation", [FULL, (2, 1.0, 0.0)])
def test_ends_of_the_unit_interval_draw_possible_tokens(
    truncation: tuple[int, float, float], uniform: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_uniform", uniform)
    logits = torch.randn(3, 700)
    logits[:, :200] = -torch.inf
    logits[:, 600:] = -torch.inf
    tokens, logprobs = both(logits, 1.0, truncation)[0]
    assert logprobs.isfinite().all()
    possible = (logits.isfinite() & (logits >= truncation_threshold(logits, 1.0, *truncation))).nonzero()
    row = possible[possible[:, 0] == 1, 1]
    assert tokens[1] == (row[0] if uniform is zero else row[-1])


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("truncation", [FULL, (3, 1.0, 0.0)])
@pytest.mark.parametrize("bad", ["nan", "inf", "all -inf"])
def test_a_broken_row_shows_in_its_logprob_only(
    bad: str, truncation: tuple[int, float, float], temperature: float
) -> None:
    logits = torch.randn(3, 300)
    logits[1] = -torch.inf if bad == "all -inf" else logits[1]
    if bad != "all -inf":
        logits[1, 150] = float(bad)
    (tokens, logprobs), (expected, _) = both(logits, temperature, truncation)
    assert logprobs.isnan().tolist() == [False, True, False]
    assert ((tokens >= 0) & (tokens < 300)).all()
    assert tokens[[0, 2]].tolist() == expected[[0, 2]].tolist()


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(3, 400)
    uid, sample, position = counters(3)
    for truncation in (FULL, (-1, 0.9, 0.0)):
        whole = sample_tokens_triton(logits, uid, sample, position, SEED, 1.0, *truncation)
        alone = sample_tokens_triton(logits[2:3], uid[2:3], sample[2:3], position[2:3], SEED, 1.0, *truncation)
        for left, right in zip(whole, alone, strict=True):
            assert_bit_equal(left[2:3], right)


def test_operator_and_its_arguments() -> None:
    logits, (uid, sample, position) = torch.randn(3, 50), counters(3)
    tokens, logprobs = sample_tokens(logits, uid, sample, position, SEED, temperature=0.5, top_k=7)
    expected = sample_tokens_reference(logits, uid, sample, position, SEED, 0.5, 7, 1.0, 0.0)
    assert_bit_equal(tokens, expected[0])
    assert_bit_equal(logprobs, expected[1])
    with pytest.raises(ValueError, match=r"`uid_N` must be int64 \[3\], found torch.int32 \[3\]|found torch.int32"):
        sample_tokens(logits, uid.int(), sample, position, SEED)
    with pytest.raises(ValueError, match=r"`seed` must be int64 \[1\]"):
        sample_tokens(logits, uid, sample, position, torch.tensor(3))


@pytest.mark.gpu
class TestOnTheGPU:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    @pytest.mark.parametrize("rows", [1, 64])
    @pytest.mark.parametrize("truncation", [pytest.param(FULL, id="full"), *TRUNCATIONS])
    def test_real_vocabulary(self, truncation: tuple[int, float, float], rows: int, dtype: torch.dtype) -> None:
        """At most one token in 64 may differ: the number fell between two roundings of the cumulative sum."""
        logits = (2 * torch.randn(rows, 151_936, device="cuda")).to(dtype)
        (tokens, logprobs), (expected, torch_logprobs) = both(logits, 0.9, truncation)
        same = tokens == expected
        assert (~same).sum() <= rows // 64
        assert (logprobs - torch_logprobs)[same].abs().max() < 1e-4

    def test_hash(self) -> None:
        """Bit-equal to torch: among two tokens, the row draws the second where the number is at least one half."""
        uid, sample, position = counters(4096, "cuda")
        tokens, _ = sample_tokens(torch.zeros(4096, 2, device="cuda"), uid, sample, position, SEED.cuda())
        u = counter_uniform(SEED, uid.cpu(), sample.cpu(), position.cpu())
        assert torch.equal(tokens.cpu(), (u >= 0.5).long())

    def test_greedy(self) -> None:
        logits = torch.randn(64, 151_936, device="cuda").bfloat16()
        (tokens, logprobs), (expected, torch_logprobs) = both(logits, 0.0, FULL)
        assert_bit_equal(tokens, expected)
        assert (logprobs - torch_logprobs).abs().max() < 1e-5

    @pytest.mark.parametrize("truncation", [FULL, (40, 0.9, 0.02)], ids=["full", "truncated"])
    def test_compiled_and_captured(self, truncation: tuple[int, float, float]) -> None:
        logits, drawn, seed = torch.randn(8, 32_000, device="cuda"), counters(8, "cuda"), SEED.cuda()
        words = dict(zip(("top_k", "top_p", "min_p"), truncation, strict=True))

        def draw() -> tuple[Tensor, Tensor]:
            return sample_tokens(logits, *drawn, seed, **words)

        expected = draw()
        for left, right in zip(torch.compile(draw, fullgraph=True)(), expected, strict=True):
            assert_bit_equal(left, right)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = draw()
        seed.add_(1)
        graph.replay()
        assert not torch.equal(captured[0], expected[0]), "the graph did not see the new seed"
        assert_bit_equal(captured[0], draw()[0])
