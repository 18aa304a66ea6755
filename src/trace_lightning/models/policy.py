"""The policy: a Hugging Face causal LM, loaded, optionally made to round like the rollout, and read out as log-probs.

The model stays a plain `PreTrainedModel`, so every checkpoint that transformers loads can be trained and
`save_pretrained` works. The vocabulary projection is kept apart from the body: for a large vocabulary [B, T, V] must
never exist.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from trace_lightning.models.checkpoint import empty_model, load_model, plain_config, quantization_of
from trace_lightning.models.identity import base_identity
from trace_lightning.models.lora import LoraConfig, frozen_tensors, install_lora
from trace_lightning.models.resolve import resolve_model_path
from trace_lightning.quantization.lora import MergedLinear, adapter_parameters, lora_state
from trace_lightning.quantization.packed_tensor import PackedFP4Tensor
from trace_lightning.quantization.qat import install_qat
from trace_lightning.quantization.recomputation import recomputation_contexts
from trace_lightning.quantization.rounding import Rounding
from trace_lightning.recipe import QuantRecipe

log = logging.getLogger(__name__)


def load_policy(
    path: str,
    recipe: QuantRecipe,
    *,
    dtype: torch.dtype,
    attention: str = "sdpa",
    gradient_checkpointing: bool = False,
    lora: LoraConfig | None = None,
    device: torch.device | None = None,
) -> PreTrainedModel:
    """Load a causal LM and install the trainer's side of `recipe`, and adapters if asked to.

    Args:
        path: `builtin:...`, `prepared:...` or a directory in Hugging Face format, in high precision or in FP4.
        recipe: with `trainer=qat` the forward rounds like the rollout; with `qat_weights` it does not round the inputs
            of linears; with `bf16` the model stays as it is.
        dtype: of the master weights; with `lora` of what is frozen and neither packed nor merged into.
        attention: attention implementation of transformers.
        gradient_checkpointing: recompute the layers in the backward pass.
        lora: freeze the model and train adapters.
        device: where a packed base is made, group by group; with `lora` everything else stays on the CPU.

    Raises:
        ValueError: if the path is not a model, or recipe or adapters do not fit it.
    """
    if lora is not None:
        lora.check(recipe)
    # Lightning's context would load onto the GPU, which may have room for the packed base alone.
    with nullcontext() if lora is None else torch.device("cpu"):
        # A base is packed from, or merged into, what the checkpoint holds: BF16 in between would round twice.
        directory = resolve_model_path(path)
        model = load_model(directory, dtype if lora is None else "auto")
        qat = install_qat(model, recipe.trained, attention=attention)
        if qat.groups:
            log.info("%s: %s", type(model).__name__, qat.layout.report())
        if lora is not None:
            install_lora(model, lora, recipe, device=device).base_identity = base_identity(directory)
            _cast_frozen(model, dtype)
            log.info("LoRA: %s", trainable_report(model))
    _switch_off_dropout(model)
    if gradient_checkpointing:
        set_gradient_checkpointing(model, True)
    trained: PreTrainedModel = model.train()  # transformers recomputes activations in train mode only
    return trained


def policy_structure(
    path: str, recipe: QuantRecipe, *, attention: str = "sdpa", lora: LoraConfig | None = None
) -> PreTrainedModel:
    """What `load_policy` makes of a path, on the meta device: modules, sites and adapters, and no weight is read.

    Raises:
        ValueError: recipe, attention or adapters do not fit the model.
        ImportError: a package that `attention` or adapters need.
    """
    directory = resolve_model_path(path)
    quantization_of(directory)
    model = empty_model(plain_config(directory))
    install_qat(model, recipe.trained, attention=attention)
    if lora is not None:
        with torch.random.fork_rng(devices=[]):  # peft draws A on the CPU
            install_lora(model, lora, recipe)
    return model


def check_same_model(stored: Mapping[str, Tensor], policy: PreTrainedModel, name: str) -> None:
    """Refuse the weights of another model before any of them is loaded.

    Args:
        stored: `state_dict` of a checkpoint, `policy.` before each name.
        policy: what they are for; may be sharded.
        name: of the policy, for the message.

    Raises:
        ValueError: weights that one side lacks, or of another shape.
    """
    there = {key.removeprefix("policy."): tuple(tensor.shape) for key, tensor in stored.items()}
    kept: Mapping[str, Tensor] = policy.state_dict() if lora_state(policy) is None else adapter_parameters(policy)
    here = {key: tuple(tensor.shape) for key, tensor in kept.items()}
    different = sorted(key for key in there.keys() | here.keys() if there.get(key) != here.get(key))
    if different:
        first = different[0]
        raise ValueError(
            f"the checkpoint is of another model than {name}: {first} has the shape {there.get(first)} there and "
            f"{here.get(first)} here ({len(different)} weights differ). Resume it with the model.path and model.lora "
            "of its run."
        )


def _cast_frozen(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """What is not packed into `dtype`; weights that adapters are merged into only if all of their values fit it."""
    merged_into = {id(module.weight) for module in model.modules() if isinstance(module, MergedLinear)}
    for tensor in frozen_tensors(model):
        if isinstance(tensor, PackedFP4Tensor):
            continue
        cast = tensor.data.to(dtype)
        if id(tensor) not in merged_into or torch.equal(cast.to(tensor.dtype), tensor):
            tensor.data = cast


def trainable_report(model: PreTrainedModel) -> str:
    """How much of the model is trained, in words."""
    trained = sum(parameter.numel() for parameter in adapter_parameters(model).values())
    whole = trained + sum(tensor.numel() for tensor in frozen_tensors(model))
    return f"{trained:,} of {whole:,} parameters are trained ({trained / whole:.2%})"


def _switch_off_dropout(model: PreTrainedModel) -> None:
    """Dropout would be noise on the trainer's side of the comparison with the rollout."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]


def set_gradient_checkpointing(model: PreTrainedModel, enabled: bool) -> None:
    """Switch recomputation of the layers on or off, without the warning of the name that transformers 5.24 retired."""
    word = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    if enabled:
        getattr(model, f"{word}_checkpointing_enable")({"use_reentrant": False, "context_fn": recomputation_contexts})
    else:
        getattr(model, f"{word}_checkpointing_disable")()


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer beside a model and make sure that completions can end and be padded.

    Raises:
        ValueError: if it has no EOS token. A missing pad token falls back to EOS: masks never look at ids.
    """
    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path(path))
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of {path} has no EOS token, so completions could only end by length. "
            "Set one in its tokenizer_config.json (eos_token)."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Every id that ends a completion: from generation config, model config and tokenizer (Llama has three)."""
    found: set[int] = set()
    for source in (model.generation_config, model.config, tokenizer):
        value: Any = getattr(source, "eos_token_id", None)
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return found


def final_hidden(model: PreTrainedModel, token_ids_BT: Tensor, rounding: Rounding | None = None) -> Tensor:
    """Hidden states [B, T, hidden] after the final norm, of right-padded sequences.

    Padding on the right is never attended by real tokens, so no mask is needed.
    """
    body = model.get_decoder()
    kwargs: dict[str, Any] = {} if rounding is None else {"trace_ctx": rounding}
    return body(input_ids=token_ids_BT, use_cache=False, **kwargs).last_hidden_state


def logits_head(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """The map from final hidden states [n, hidden] to logits [n, V], with the scaling and caps some families use."""
    head: nn.Module = model.get_output_embeddings()
    config = model.config
    scale = getattr(config, "logit_scale", None) or 1.0
    scale = scale / (getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)

    def project(hidden: Tensor) -> Tensor:
        logits = head(hidden) if scale == 1.0 else head(hidden) * scale
        return logits if cap is None else torch.tanh(logits / cap) * cap

    return project
