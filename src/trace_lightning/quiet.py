"""Messages of other libraries that no user can act on, silenced one by one; a new one shows until it is listed."""

from __future__ import annotations

import logging
import warnings

_SILENCED_LOGS = {
    # torchao: kernels of other builds of Python and CUDA than this one; we use its tensor classes only.
    "torchao": ("Failed to load ", "Skipping import of cpp extensions"),
    # torch, on how torchao declares its enums.
    "torch.utils._pytree": ("is an Enum subclass and is now natively supported",),
    # Lightning: advertisements, and the count of TPUs where there are none.
    "lightning.pytorch.utilities.rank_zero": ("Tip: For seamless cloud", "TPU available: False"),
}
_SILENCED_WARNINGS = (
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # Lightning 2.6 on torch 2.13
    r"Found \d+ module\(s\) in eval mode at the start of training",  # as transformers loads them; the rollout needs it
    r"It is recommended to use `self\.log\(",  # with sync_dist: what we log is a mean over all ranks already
    r"Total length of `list` across ranks is zero",  # no held-out problems
    r"Checkpoint directory .* exists and is not empty",  # a resumed run in the folder of the first
)


class _Silence(logging.Filter):
    """Drops records that contain one of the given texts."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        super().__init__()
        self.texts = texts

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return not any(text in message for text in self.texts)


def quiet_imports() -> None:
    """Install the filters of `_SILENCED_LOGS`, once."""
    for name, texts in _SILENCED_LOGS.items():
        logger = logging.getLogger(name)
        if not any(isinstance(present, _Silence) for present in logger.filters):
            logger.addFilter(_Silence(texts))


def quiet_runtime() -> None:
    """Silence the warnings of `_SILENCED_WARNINGS`, and the bars with which transformers reads and writes weights."""
    from transformers.utils import logging as transformers_logging

    for message in _SILENCED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    transformers_logging.disable_progress_bar()
