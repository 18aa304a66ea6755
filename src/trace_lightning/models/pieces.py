"""The text of each token of a completion, so that the pieces together are the completion.

Decoding tokens one by one is not enough: a character of several bytes may be spread over several tokens, and each of
them alone decodes to U+FFFD. Such tokens are decoded together; the character belongs to the token that completes it,
and those before it have no text. Everything else comes from a table of single tokens, which costs no call.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

_HALF = "\N{REPLACEMENT CHARACTER}"


class TokenPieces:
    """Splits texts of one tokenizer.

    Args:
        tokenizer: of the policy.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._known: dict[int, str] = {}
        # Tokenizers of the SentencePiece family drop a space at the start of a text: no token is decoded at the start.
        self._anchor: list[int] = tokenizer.encode("a", add_special_tokens=False)[-1:]
        self._anchor_length = len(self._decode(self._anchor))

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _alone(self, token_id: int) -> str:
        if token_id not in self._known:
            self._known[token_id] = self._decode([*self._anchor, token_id])[self._anchor_length :]
        return self._known[token_id]

    def __call__(self, token_ids: Sequence[int]) -> list[str]:
        """One piece per token, "" for tokens without a text of their own."""
        if not token_ids:
            return []
        first, *rest = token_ids
        if _HALF in self._decode([first]):
            return self._settled(token_ids)
        pieces = [self._decode([first])]
        for is_half, run in itertools.groupby(rest, key=lambda token_id: _HALF in self._alone(token_id)):
            tokens = list(run)
            pieces += self._settled(tokens) if is_half else map(self._alone, tokens)
        return pieces if "".join(pieces) == self._decode(token_ids) else self._settled(token_ids)

    def _settled(self, token_ids: Sequence[int]) -> list[str]:
        """By decoding every prefix: a token's piece is what later tokens no longer change."""
        text, pieces, done = self._decode(token_ids), [], 0
        for end in range(1, len(token_ids) + 1):
            before = self._decode(token_ids[:end])
            upto = len(before) if text.startswith(before) else done
            pieces.append(text[done : max(done, upto)])
            done = max(done, upto)
        return pieces
