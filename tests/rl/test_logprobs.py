"""token_logprobs against plain log_softmax: values, gradients, chunking, temperature, renormalisation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from trace_lightning.rl import token_and_topk_logprobs, token_logprobs

N, D, V = 13, 8, 29


@pytest.fixture
def case() -> tuple[Tensor, nn.Linear, Tensor]:
    return torch.randn(N, D, requires_grad=True), nn.Linear(D, V), torch.randint(V, (N,))


def plain(hidden: Tensor, head: nn.Module, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logprobs = torch.log_softmax(head(hidden) / temperature, dim=-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
@pytest.mark.parametrize("chunk_size", [1, 5, N, 1024])
def test_values_and_gradients_equal_plain_log_softmax(case, temperature: float, chunk_size: int) -> None:
    hidden, head, targets = case
    expected, expected_entropy = plain(hidden, head, targets, temperature)
    logprobs, entropy = token_logprobs(hidden, head, targets, temperature=temperature, chunk_size=chunk_size)
    torch.testing.assert_close(logprobs, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(entropy, expected_entropy.detach(), atol=1e-5, rtol=1e-6)
    upstream = torch.randn(N)
    wanted = torch.autograd.grad((expected * upstream).sum(), [hidden, head.weight])
    got = torch.autograd.grad((logprobs * upstream).sum(), [hidden, head.weight])
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_chunk_size_changes_no_bit_of_the_arithmetic_after_the_head() -> None:
    # The head is a table look-up here: a matmul may itself round differently for another number of rows.
    table, targets = torch.randn(N, V) * 5, torch.randint(V, (N,))
    rows = torch.arange(N)[:, None].float()

    def head(hidden: Tensor) -> Tensor:
        return table[hidden[:, 0].long()]

    results = [token_logprobs(rows, head, targets, temperature=0.7, chunk_size=size) for size in (1, 4, 100)]
    for logprobs, entropy in results[1:]:
        assert torch.equal(logprobs, results[0][0])
        assert torch.equal(entropy, results[0][1])


def test_no_tensor_of_all_rows_and_words_is_kept() -> None:
    hidden, head, targets = torch.randn(64, D, requires_grad=True), nn.Linear(D, V), torch.randint(V, (64,))
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.numel()), t)[1], lambda t: t):
        token_logprobs(hidden, head, targets, temperature=1.0, chunk_size=16)
    assert max(kept, default=0) < 16 * V


def test_value_is_the_same_with_and_without_gradient(case) -> None:
    hidden, head, targets = case
    with_grad, _ = token_logprobs(hidden, head, targets, temperature=0.6, chunk_size=4)
    with torch.no_grad():
        without, _ = token_logprobs(hidden, head, targets, temperature=0.6, chunk_size=4)
    assert torch.equal(with_grad, without)
    assert with_grad.requires_grad


def test_entropy_is_detached_and_not_computed_twice(case) -> None:
    hidden, head, targets = case
    logprobs, entropy = token_logprobs(hidden, head, targets, temperature=1.0)
    assert not entropy.requires_grad
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trace_lightning.rl.logprobs._entropy", lambda _: pytest.fail("entropy was recomputed"))
        logprobs.sum().backward()


def test_entropy_left_out_is_nan(case) -> None:
    hidden, head, targets = case
    logprobs, entropy = token_logprobs(hidden, head, targets, temperature=1.0, with_entropy=False)
    assert entropy.isnan().all()
    assert entropy.shape == (N,)
    logprobs.sum().backward()
    assert hidden.grad.isfinite().all()


def test_confident_tokens_keep_their_logprob() -> None:
    # log(1 + e**-14) = 8.3e-7; `logit - logsumexp` at a logit of 30 would give 0 or 1.9e-6.
    logits = torch.tensor([[30.0, 16.0]])
    logprobs, _ = token_logprobs(torch.zeros(1, 1), lambda _: logits, torch.tensor([0]), temperature=1.0)
    assert logprobs.item() == pytest.approx(-8.315e-7, rel=0.08)


def test_bf16_logits_are_normalised_in_fp32(case) -> None:
    hidden, head, targets = case
    logits = head(hidden).detach().bfloat16()
    logprobs, entropy = token_logprobs(hidden.detach(), lambda _: logits, targets, temperature=0.7)
    expected = torch.log_softmax(logits.float() / 0.7, -1).gather(-1, targets[:, None]).squeeze(-1)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert torch.equal(logprobs, expected)


@pytest.mark.parametrize("chunk_size", [3, 1024])
def test_support_renormalises_over_what_could_be_drawn(case, chunk_size: int) -> None:
    hidden, head, _ = case
    temperature, top_k = 0.8, 5
    logits = head(hidden) / temperature
    support = logits.topk(top_k).indices
    support[::2, -2:] = -1  # ragged rows, padded
    targets = support[:, 1]
    allowed = torch.zeros(N, V, dtype=torch.bool)
    for row, ids in enumerate(support.tolist()):
        allowed[row, [i for i in ids if i >= 0]] = True
    reference = torch.log_softmax(logits.masked_fill(~allowed, -torch.inf), dim=-1)
    expected = reference.gather(-1, targets[:, None]).squeeze(-1)
    logprobs, entropy = token_logprobs(
        hidden, head, targets, temperature=temperature, support_NK=support, chunk_size=chunk_size
    )
    torch.testing.assert_close(logprobs, expected, atol=1e-6, rtol=1e-6)
    expected_entropy = torch.special.entr(reference.detach().exp()).sum(-1)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=1e-6)
    full, _ = token_logprobs(hidden, head, targets, temperature=temperature)
    assert (logprobs > full).all()  # the quiet ratio below 1 that ignoring the truncation would cause
    wanted = torch.autograd.grad(expected.sum(), [hidden, head.weight])
    got = torch.autograd.grad(logprobs.sum(), [hidden, head.weight])
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk_size", [4, 1024])
def test_more_ids_are_scored_under_the_same_softmax(case, chunk_size: int) -> None:
    hidden, head, targets = case
    ids = torch.randint(0, V, (N, 5))
    ids[::3, -2:] = -1
    logprobs, _, more = token_and_topk_logprobs(hidden, head, targets, ids, temperature=0.8, chunk_size=chunk_size)
    reference = torch.log_softmax(head(hidden) / 0.8, dim=-1)
    expected = reference.gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, -torch.inf)
    torch.testing.assert_close(more, expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(logprobs, token_logprobs(hidden, head, targets, temperature=0.8, chunk_size=chunk_size)[0])
    factors = torch.rand(N, 5)
    wanted, got = (
        torch.autograd.grad((factors * torch.where(ids < 0, 0.0, x)).sum() + y.sum(), [hidden, head.weight])
        for x, y in ((expected, reference.gather(-1, targets[:, None])), (more, logprobs))
    )
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_more_ids_that_do_not_belong_are_named(case) -> None:
    hidden, head, targets = case
    with pytest.raises(ValueError, match=r"topk \(5, 2\): expected \[13, K\]"):
        token_and_topk_logprobs(hidden, head, targets, torch.zeros(5, 2).long(), temperature=1.0)
    ids = targets[:, None]
    with pytest.raises(ValueError, match="untruncated sampling"):
        token_and_topk_logprobs(hidden, head, targets, ids, temperature=1.0, support_NK=ids)


def test_support_of_one_token_has_logprob_zero(case) -> None:
    hidden, head, targets = case
    logprobs, entropy = token_logprobs(hidden, head, targets, temperature=1.0, support_NK=targets[:, None])
    assert torch.equal(logprobs, torch.zeros(N))
    assert torch.equal(entropy, torch.zeros(N))


def test_no_rows_keep_the_graph(case) -> None:
    hidden, head, _ = case
    logprobs, entropy = token_logprobs(hidden[:0], head, torch.empty(0, dtype=torch.long), temperature=1.0)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert torch.equal(head.weight.grad, torch.zeros_like(head.weight))


def test_bad_input_is_named(case) -> None:
    hidden, head, targets = case
    with pytest.raises(ValueError, match="temperature=0"):
        token_logprobs(hidden, head, targets, temperature=0)
    with pytest.raises(ValueError, match="chunk_size=0"):
        token_logprobs(hidden, head, targets, temperature=1.0, chunk_size=0)
    with pytest.raises(ValueError, match="one state per target"):
        token_logprobs(hidden, head, targets[:-1], temperature=1.0)
    with pytest.raises(ValueError, match="13 of 13 targets are not in their support"):
        token_logprobs(hidden, head, targets, temperature=1.0, support_NK=(targets[:, None] + 1) % V)
    with pytest.raises(ValueError, match=r"expected \[13, K\]"):
        token_logprobs(hidden, head, targets, temperature=1.0, support_NK=targets[:5, None])
