"""What an environment says, in tokens. The policy's own tokens are never encoded again, so only the new part is made.

    plain prompt    the text by itself, without special tokens
    chat prompt     what the chat template puts between the end of one answer and the beginning of the next: the end of
                    the answer's message, a message with the observation, and the prompt for the next answer

The second is read off a made-up conversation. That is right only where a template appends: one that rewrites earlier
messages (Qwen3's drops the thoughts of answers before a user's message) would later show the policy another text than
the one it wrote in, so it is refused.
"""

from __future__ import annotations

from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from trace_lightning.types import Problem

_ANSWERS = ("an answer", "<think>\na thought\n</think>\n\nan answer")


class ObservationEncoder:
    """From observations to token ids.

    Args:
        tokenizer: of the policy.
        role: of the message in which a chat prompt gets an observation.
        variables: for the chat template.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, role: str = "user", variables: dict[str, Any] | None = None
    ) -> None:
        self.tokenizer, self.role, self.variables = tokenizer, role, dict(variables or {})

    def check(self, problem: Problem) -> None:
        """See that conversations about `problem` can be told to the policy.

        Raises:
            ValueError: chat messages under a template that does not append.
        """
        if not isinstance(problem.prompt, str):
            for answer in _ANSWERS:
                self._delta(answer, "an observation")

    def __call__(self, problem: Problem, observation: str, last_token: int) -> list[int]:
        """Ids to append behind `last_token`, the last of the policy's turn."""
        if isinstance(problem.prompt, str):
            return self._ids(observation) if observation else []
        ids = self._ids(self._delta(_ANSWERS[0], observation))
        return ids[1:] if ids and ids[0] == last_token else ids  # the policy has ended its message by itself

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _delta(self, answer: str, observation: str) -> str:
        """What the template puts behind `answer`."""
        question = [{"role": "user", "content": "a question"}]
        more = [{"role": "assistant", "content": answer}, {"role": self.role, "content": observation}]
        before, after = self._render(question) + answer, self._render(question + more)
        if not after.startswith(before):
            raise ValueError(
                f"the chat template does not append: after an answer like {answer!r} and a message of role "
                f"{self.role!r} it renders the answer in another way than the policy wrote it. Set data.chat_template "
                "to one that keeps earlier messages as they were, or the task's observation_role to another role "
                "(Qwen3's template keeps thoughts before role tool)."
            )
        return after[len(before) :]

    def _render(self, messages: list[dict[str, str]]) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self.variables
            )
        except jinja2.TemplateError as error:
            raise ValueError(
                f"the chat template refuses a message of role {self.role!r} after an answer: {error}"
            ) from error
        return str(text)
