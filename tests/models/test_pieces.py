"""Pieces concatenate to the completion, whichever way a tokenizer treats bytes, spaces and special tokens."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trace_lightning.models.pieces import TokenPieces

TEXT = "so 12 + 30 = 42 ✓ naïve 答案是 42。 👩\u200d🔬 done"


def byte_level() -> PreTrainedTokenizerFast:
    """One token per byte, and a few merged ones: characters of several bytes are always split."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "Ġso", "42", "<eos>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("4", "2")], unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def sentence_piece() -> PreTrainedTokenizerFast:
    """Words that begin with a space, which is dropped at the start of a text; bytes for what it does not know."""
    words = ["<eos>", "▁so", "▁12", "▁done", "▁", "a", "▁42", "x"]
    vocab = {token: i for i, token in enumerate([*words, *(f"<0x{i:02X}>" for i in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
def test_pieces_are_the_completion(make) -> None:
    tokenizer, rng = make(), random.Random(0)
    split = TokenPieces(tokenizer)
    ids = tokenizer.encode(TEXT)
    assert len(ids) > 40
    cases = [ids[start:end] for start in range(len(ids)) for end in (start + 1, start + 7, len(ids))]
    cases += [[rng.randrange(len(tokenizer)) for _ in range(30)] for _ in range(100)]  # mostly broken bytes
    for case in [*cases, [*ids, tokenizer.eos_token_id], []]:
        pieces = split(case)
        assert len(pieces) == len(case)
        assert "".join(pieces) == tokenizer.decode(case, skip_special_tokens=True)


def test_a_character_belongs_to_the_token_that_completes_it() -> None:
    tokenizer = byte_level()
    pieces = TokenPieces(tokenizer)([*tokenizer.encode("1✓2答"), tokenizer.eos_token_id])
    assert pieces == ["1", "", "", "✓", "2", "", "", "答", ""]


def test_plain_tokens_are_decoded_once(monkeypatch) -> None:
    tokenizer = byte_level()
    split, ids, calls = TokenPieces(tokenizer), tokenizer.encode("12 + 30 = 42, " * 20), []
    split(ids)
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda *args, **kwargs: calls.append(1) or decode(*args, **kwargs))
    assert "".join(split(ids)) == decode(ids)
    assert len(calls) <= 3
