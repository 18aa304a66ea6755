"""What an environment says, in tokens: the same ids as if the template had rendered the whole conversation."""

from __future__ import annotations

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trace_lightning.rollout.observations import ObservationEncoder
from trace_lightning.types import Problem

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# As Qwen3's: an answer in front of a user's message loses its thoughts, one in front of a tool's keeps them.
FORGETFUL = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1].lstrip('\\n') }}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
NO_TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}{% endfor %}"
    + CHATML
)
START, END = "<|im_start|>", "<|im_end|>"


def make_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Characters, the two marks of ChatML, and a BOS that plain prompts begin with."""
    characters = [chr(i) for i in range(32, 127)] + ["\n"]
    vocabulary = {token: i for i, token in enumerate(["<bos>", START, END, *characters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token=END, additional_special_tokens=[START, END]
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("ended", [True, False], ids=["ended by itself", "stopped"])
def test_a_chat_observation_continues_the_conversation(role: str, ended: bool) -> None:
    tokenizer = make_tokenizer(CHATML)
    messages = [{"role": "user", "content": "2*3?"}]
    problem, encode = Problem(prompt=messages), ObservationEncoder(tokenizer, role)
    encode.check(problem)

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    drawn = ids("<2*3>" + END * ended)
    whole = [*messages, {"role": "assistant", "content": "<2*3>"}, {"role": role, "content": "6"}]
    rendered = tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
    assert ids(prompt) + drawn + encode(problem, "6", drawn[-1]) == ids(rendered)


def test_a_template_that_rewrites_answers_is_refused() -> None:
    chat, plain = Problem(prompt=[{"role": "user", "content": "2*3?"}]), Problem(prompt="2*3=")
    tokenizer = make_tokenizer(FORGETFUL)
    with pytest.raises(ValueError, match=r"does not append.*<think>.*'user'.*data\.chat_template.*observation_role"):
        ObservationEncoder(tokenizer, "user").check(chat)
    ObservationEncoder(tokenizer, "user").check(plain)
    ObservationEncoder(tokenizer, "tool").check(chat)
    with pytest.raises(ValueError, match="refuses a message of role 'tool' after an answer: no tools here"):
        ObservationEncoder(make_tokenizer(NO_TOOLS), "tool").check(chat)


def test_a_plain_observation_is_the_text_alone() -> None:
    encode = ObservationEncoder(make_tokenizer(CHATML))
    assert encode(Problem(prompt="2*3="), "6\n", 5) == [encode.tokenizer.convert_tokens_to_ids(c) for c in "6\n"]
    assert encode(Problem(prompt="2*3="), "", 5) == []
