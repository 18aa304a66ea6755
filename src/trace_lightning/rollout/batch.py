"""One forward pass of the engine: N flat tokens of B sequences, and the attention they take part in.

Prefill and decode are the same call. A decode step feeds one token per sequence; a prefill feeds whole prompts. Tokens
are flat everywhere but in attention, so no linear ever runs over padding.

    N fed tokens   B sequences   T longest run of fed tokens in a sequence (1 when decoding)   L longest context
    H query heads  K KV heads    G = H / K   D head dim
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trace_lightning.quantization.rounding import NearestRounding
from trace_lightning.rollout.kv_pool import PagedKV


@dataclass
class ForwardBatch:
    """Index tensors of one pass, all int64 on the device."""

    token_ids_N: Tensor
    positions_N: Tensor
    write_slots_N: Tensor
    read_slots_BL: Tensor  # slot of each position of each sequence; beyond its context any slot, it is masked
    query_index_BT: Tensor | None  # flat index of a sequence's t-th fed token; None when T = 1 and N = B
    flat_index_N: Tensor | None  # inverse: position of a flat token in [B * T]
    last_index_B: Tensor | None  # flat index of each sequence's last fed token; None when N = B
    rounding: NearestRounding


def prefill_batch(
    token_ids: list[list[int]], pages: list[list[int]], page_size: int, device: torch.device, rounding: NearestRounding
) -> ForwardBatch:
    """Feed whole sequences from position 0; `pages[b]` are the pages of sequence b, in order."""
    lengths = [len(ids) for ids in token_ids]
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    slots = [
        [p[t // page_size] * page_size + t % page_size for t in range(n)] for p, n in zip(pages, lengths, strict=True)
    ]
    steps = torch.arange(max(lengths))
    inside = steps < torch.tensor(lengths).unsqueeze(1)
    index = {
        "token_ids_N": torch.tensor([token for ids in token_ids for token in ids]),
        "positions_N": torch.cat([steps[:n] for n in lengths]),
        "write_slots_N": torch.tensor([slot for row in slots for slot in row]),
        "read_slots_BL": torch.tensor([row + [row[0]] * (max(lengths) - len(row)) for row in slots]),
        # Padding repeats the sequence's first token: a valid query whose result is not read.
        "query_index_BT": torch.where(inside, starts.unsqueeze(1) + steps, starts.unsqueeze(1)),
        "flat_index_N": inside.flatten().nonzero().squeeze(-1),
        "last_index_B": starts + torch.tensor(lengths) - 1,
    }
    return ForwardBatch(**{name: tensor.to(device) for name, tensor in index.items()}, rounding=rounding)


def decode_batch(
    token_ids: list[int], positions: list[int], page_table_BP: Tensor, page_size: int, rounding: NearestRounding
) -> ForwardBatch:
    """Feed one token per sequence; `page_table_BP` int64 on the device, padded with any valid page."""
    device = page_table_BP.device
    length = max(positions) + 1
    positions_N = torch.tensor(positions, device=device)
    slots = page_table_BP.unsqueeze(-1) * page_size + torch.arange(page_size, device=device)
    slots_BL = slots.flatten(1)[:, :length]
    return ForwardBatch(
        token_ids_N=torch.tensor(token_ids, device=device),
        positions_N=positions_N,
        write_slots_N=slots_BL.gather(1, positions_N.unsqueeze(1)).squeeze(1),
        read_slots_BL=slots_BL,
        query_index_BT=None,
        flat_index_N=None,
        last_index_B=None,
        rounding=rounding,
    )


def paged_attention(
    q_NHD: Tensor, kv: PagedKV, layer: int, batch: ForwardBatch, *, scaling: float, window: int | None
) -> Tensor:
    """Attention of the fed tokens over everything their sequences hold in the cache, themselves included.

    Args:
        q_NHD: rotated queries.
        kv: the cache; K and V of the fed tokens are already written.
        layer: decoder layer index.
        batch: whose tokens these are.
        scaling: factor on the scores.
        window: sliding window in tokens, or None.

    Returns:
        [N, H, D] in the cache's dtype.
    """
    k_BLKD, v_BLKD = kv.read(layer, batch.read_slots_BL)
    q_BTHD = q_NHD.unsqueeze(1) if batch.query_index_BT is None else q_NHD[batch.query_index_BT]
    positions_BT = (
        batch.positions_N.unsqueeze(1) if batch.query_index_BT is None else batch.positions_N[batch.query_index_BT]
    )
    b, t, h, d = q_BTHD.shape
    kv_heads = k_BLKD.shape[2]
    # Heads of one group share K and V: fold them into the query rows instead of repeating K and V.
    q = q_BTHD.to(k_BLKD.dtype).view(b, t, kv_heads, h // kv_heads, d).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask_BTL = _visible(positions_BT, k_BLKD.shape[1], window)
    mask = mask_BTL.unsqueeze(1).repeat(1, h // kv_heads, 1, 1).flatten(1, 2).unsqueeze(1)
    o = F.scaled_dot_product_attention(q, k_BLKD.transpose(1, 2), v_BLKD.transpose(1, 2), attn_mask=mask, scale=scaling)
    o_BTHD = o.unflatten(2, (h // kv_heads, t)).permute(0, 3, 1, 2, 4).reshape(b * t, h, d)
    return o_BTHD if batch.flat_index_N is None else o_BTHD[batch.flat_index_N]


def _visible(positions_BT: Tensor, length: int, window: int | None) -> Tensor:
    """Bool [B, T, L]: which cached positions a query at its own position may see."""
    keys_L = torch.arange(length, device=positions_BT.device)
    visible = keys_L <= positions_BT.unsqueeze(-1)
    return visible if window is None else visible & (keys_L > positions_BT.unsqueeze(-1) - window)
