"""The tiny Qwen3 that ships with the package, and its character tokenizer: real RL on a CPU without a model hub.

Size is chosen by what learns fast, not by what is smallest: at the usual initialisation (0.02) or with two heads the
same training stalls near 10 % accuracy. All widths are whole FP4 blocks (16 and 32), so that NVFP4 and MXFP4 act on
it as they do on a large model. `examples/pretrain_tiny.py` makes the packaged checkpoint from these two functions.

What was left out: a BOS token in front of prompts. It has an id, as loaders expect one, but like Qwen's own tokenizers
ours never adds it.
"""

from __future__ import annotations

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
CHARACTERS = "0123456789+-*/=%^()<>.,:?! \n"
VOCABULARY = (PAD, BOS, EOS, UNK, *CHARACTERS)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, 32 in all; characters outside `CHARACTERS` become `<unk>`."""
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        model_max_length=128,
        clean_up_tokenization_spaces=False,
    )


def tiny_config() -> Qwen3Config:
    """Hidden 128, 2 layers, 4 heads and 2 KV heads of 64, intermediate 256, tied embeddings: 0.40 M parameters."""
    return Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.06,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )


def tiny_model(seed: int = 0) -> Qwen3ForCausalLM:
    """The tiny Qwen3 in FP32 with random weights, the same for the same `seed`; the global generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(tiny_config())
    model.generation_config = GenerationConfig(pad_token_id=PAD_ID, bos_token_id=BOS_ID, eos_token_id=EOS_ID)
    return model
