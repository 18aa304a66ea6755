"""What a layer found at great cost in the forward pass, kept for its recomputation in the backward pass.

With gradient checkpointing each layer runs twice per micro-batch. Torch asks for `recomputation_contexts` once per
checkpointed call of a layer, and runs the call under the first and its recomputation under the second:

    forward pass     found_once(key, find)  ->  find(), kept          one dict per call: it goes with the call's graph,
    backward pass    found_once(key, find)  ->  kept, let go of       and cannot meet another micro-batch's numbers
    anywhere else    found_once(key, find)  ->  find()

Without checkpointing, and without gradients, torch enters neither context, so nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token

from torch import Tensor

from trace_lightning.quantization.guidance import Key


class _LayerPass(AbstractContextManager[None]):
    """One of the two passes of a checkpointed call."""

    def __init__(self, kept: dict[Key, Tensor], *, recomputes: bool) -> None:
        self.kept, self.recomputes = kept, recomputes
        self._outer: Token[_LayerPass | None] | None = None

    def __enter__(self) -> None:
        self._outer = _RUNNING.set(self)

    def __exit__(self, *_: object) -> None:
        assert self._outer is not None
        _RUNNING.reset(self._outer)


# Of this thread: the backward pass of a GPU runs in one of its own.
_RUNNING: ContextVar[_LayerPass | None] = ContextVar("layer_pass", default=None)


def recomputation_contexts() -> tuple[_LayerPass, _LayerPass]:
    """`context_fn` of `torch.utils.checkpoint.checkpoint`."""
    kept: dict[Key, Tensor] = {}
    return _LayerPass(kept, recomputes=False), _LayerPass(kept, recomputes=True)


def found_once(key: Key, find: Callable[[], Tensor]) -> Tensor:
    """`find()`, or in a recomputation what it gave in the forward pass."""
    running = _RUNNING.get()
    if running is not None and running.recomputes and key in running.kept:
        return running.kept.pop(key)
    found = find()
    if running is not None and not running.recomputes:
        running.kept[key] = found
    return found
