"""Is the decoder the same model? Checked once against the policy's own forward, before anything is drawn from it."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trace_lightning.models.policy import final_hidden
from trace_lightning.models.sharding import as_forward
from trace_lightning.quantization.qat import QATState
from trace_lightning.rollout.batch import PrefillBatch, Segment
from trace_lightning.rollout.decoder import Decoder
from trace_lightning.rollout.kv_pool import PagedKV

_NUM_TOKENS, _PAGE_SIZE = 11, 16


@torch.no_grad()
def check_decoder(decoder: Decoder, policy: PreTrainedModel, dtype: torch.dtype) -> None:
    """Compare last hidden states on a few tokens, everything unquantised (weights loaded with `quantize=False`).

    Raises:
        ValueError: if they differ by more than arithmetic in `dtype` explains.
    """
    embedding: Tensor = policy.get_input_embeddings().weight  # type: ignore[assignment]
    ids = torch.arange(_NUM_TOKENS, device=embedding.device) * 7919 % embedding.shape[0]
    kv = PagedKV(
        [None] * len(decoder.kv_formats),
        num_pages=1,
        page_size=_PAGE_SIZE,
        num_kv_heads=decoder.num_kv_heads,
        head_dim=decoder.head_dim,
        dtype=dtype,
        device=embedding.device,
    )
    batch = PrefillBatch.of([Segment(ids.tolist(), 0, [0])], _PAGE_SIZE, embedding.device)
    with ExitStack() as stack:
        stack.enter_context(decoder.unquantized())
        qat = getattr(policy, "trace_qat", None)
        if isinstance(qat, QATState):
            stack.enter_context(qat.unquantized())
        ours = decoder.forward(batch, kv).float()
        stack.enter_context(torch.autocast(embedding.device.type, dtype, enabled=dtype != embedding.dtype))
        was_training = policy.training
        policy.eval()
        theirs = as_forward(policy, final_hidden, policy, ids.unsqueeze(0))[:, -1].float()
        policy.train(was_training)
    error = ((ours - theirs).norm() / theirs.norm()).item()
    limit = 1e-3 if dtype == torch.float32 else 5e-2
    if not error <= limit:
        raise ValueError(
            f"the engine's decoder disagrees with {type(policy).__name__}: relative error {error:.1e} of the last "
            f"hidden state, limit {limit:.0e}. Use engine.decoder=hf; if that fails too, this architecture cannot be "
            "rolled out over a paged cache."
        )
