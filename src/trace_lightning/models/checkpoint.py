"""Directories in Hugging Face format, read tensor by tensor, FP4 ones included.

    StoredTensors     name -> tensor of one or many safetensors files, mapped, and read when it is asked for
    FP4Checkpoint     the same of a checkpoint with FP4 linears: a weight is its value, and its bytes are there as well
    load_model        a model with FP32 or BF16 masters from either kind

transformers reads FP4 checkpoints too, but into modules that cannot be trained, and only with a package installed. Here
the model stays plain: the masters of a run that starts from FP4 are the values that its codes mean, subnormal block
scales and arbitrary per-tensor scales included.

What was left out: pickled weights (`pytorch_model.bin`) beside FP4, and quantised embeddings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from trace_lightning.quantization.dialects import DIALECTS, Dialect, FP4Linear, Scheme

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: if it is none, naming the file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); the file is damaged") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    return content


class StoredTensors(Mapping[str, Tensor]):
    """Tensors of a directory of safetensors files; nothing is kept.

    Raises:
        ValueError: no such files, a file that is missing or cut short, or an index that names what is not there.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        index = directory / INDEX
        if index.is_file():
            files: dict[str, str] = read_json(index).get("weight_map") or {}
        elif (directory / SINGLE).is_file():
            files = dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        else:
            raise ValueError(f"{directory} has neither {SINGLE} nor {INDEX}")
        self._files = files
        self._handles = {file: self._open(file) for file in sorted(set(files.values()))}
        for name, file in files.items():
            if name not in self._handles[file].keys():  # noqa: SIM118  safe_open is no mapping
                raise ValueError(f"{index} says that the tensor {name} is in {file}, but it is not")

    def _open(self, file: str) -> Any:
        path = self.directory / file
        if not path.is_file():
            raise ValueError(f"{self.directory / INDEX} names {file}, which is missing")
        try:
            return safe_open(path, framework="pt").__enter__()
        except SafetensorError as error:
            raise ValueError(f"{path} is cut short or no safetensors file: {error}") from error

    def __getitem__(self, name: str) -> Tensor:
        return self._handles[self._files[name]].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Without reading the tensor."""
        return tuple(self._handles[self._files[name]].get_slice(name).get_shape())

    def rows(self, name: str) -> Tensor:
        """The first, the middle and the last row of a tensor, without reading the others; a scalar as it is."""
        shape = self.shape(name)
        if not shape:
            return self[name]
        part = self._handles[self._files[name]].get_slice(name)
        return torch.cat([part[row : row + 1] for row in sorted({0, shape[0] // 2, max(0, shape[0] - 1)})])


def quantization_of(directory: Path) -> tuple[Dialect, Scheme] | None:
    """Dialect and scheme of a checkpoint; None if it is not quantised.

    Raises:
        ValueError: quantised in a way that cannot be read here.
    """
    section = read_json(directory / "config.json").get("quantization_config")
    beside = directory / "hf_quant_config.json"
    if section is None and beside.is_file():
        section = {"quant_method": "modelopt", **read_json(beside)}
    if section is None:
        return None
    method = str(section.get("quant_method", ""))
    method = "modelopt" if method.startswith("modelopt") else method
    if method not in DIALECTS:
        raise ValueError(
            f"{directory} is quantised by {method or 'an unnamed method'}; {' and '.join(DIALECTS)} can be read. Start "
            "from the checkpoint in high precision that it was made from"
        )
    try:
        return DIALECTS[method], DIALECTS[method].parse(section)
    except ValueError as error:
        raise ValueError(f"{directory} cannot be read: {error}") from error


def plain_config(directory: Path) -> PretrainedConfig:
    """The config of a directory, as of a model in high precision."""
    config: PretrainedConfig = AutoConfig.from_pretrained(directory)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def empty_model(config: PretrainedConfig) -> PreTrainedModel:
    """The modules of a causal LM on the meta device: names and shapes, no weights."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def weight_names(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shape of each weight that a checkpoint of `model` holds; of tied weights one, persistent buffers included."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return shapes | {name: tuple(t.shape) for name, t in model.state_dict().items() if name not in tied}


def check_weights(weights: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Compare what is stored with what a model wants, before long work.

    Raises:
        ValueError: naming the first tensor that is missing or has another shape.
    """
    for name, shape in shapes.items():
        if name not in weights:
            raise ValueError(f"{where} is incomplete, or of another model: the tensor {name} {shape} is missing")
        of = getattr(weights, "shape", None)
        found = of(name) if of is not None else tuple(weights[name].shape)
        if found != shape:
            raise ValueError(f"{where}: the tensor {name} has the shape {found}, the model wants {shape}")


class FP4Checkpoint(Mapping[str, Tensor]):
    """The weights of an FP4 checkpoint under their names in the model; quantised ones come as FP32 values.

    Args:
        directory: with config.json.
        model: of that config, on any device; only names and shapes are looked at.

    Raises:
        ValueError: naming a tensor that is missing or does not fit, or one that belongs to no weight of the model.
    """

    def __init__(self, directory: Path, model: PreTrainedModel) -> None:
        found = quantization_of(directory)
        assert found is not None, "not an FP4 checkpoint"
        self.directory, (self.dialect, self.scheme) = directory, found
        self.stored = StoredTensors(directory)
        self._shapes = weight_names(model)
        self.quantized = frozenset(self.dialect.quantized(self.stored))
        for name in sorted(self.quantized):
            self.linear(name)
        check_weights(self, self._shapes, str(directory))

    def linear(self, name: str) -> FP4Linear:
        """The stored bytes of one quantised linear."""
        shape = self._shapes.get(f"{name}.weight")
        if shape is None or len(shape) != 2:
            raise ValueError(f"{self.directory} holds {name} in FP4, which is no linear of {self._model_name()}")
        try:
            return self.dialect.read(name, self.stored, self.scheme, (shape[0], shape[1]))
        except ValueError as error:
            raise ValueError(f"{self.directory}: {error}") from error

    def _model_name(self) -> str:
        return " ".join(read_json(self.directory / "config.json").get("architectures") or ["its config"])

    def _is_quantized(self, name: str) -> bool:
        return name.endswith(".weight") and name.removesuffix(".weight") in self.quantized

    def __getitem__(self, name: str) -> Tensor:
        if self._is_quantized(name):
            return self.linear(name.removesuffix(".weight")).packed.dequantize(torch.float32)
        return self.stored[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._shapes if self._is_quantized(name) or name in self.stored)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def shape(self, name: str) -> tuple[int, ...]:
        """Without dequantising."""
        return self._shapes[name] if self._is_quantized(name) else self.stored.shape(name)


def load_model(directory: Path, dtype: torch.dtype | Literal["auto"]) -> PreTrainedModel:
    """A causal LM with plain weights; those of an FP4 checkpoint are the values that its codes mean.

    Args:
        directory: in Hugging Face format.
        dtype: of the weights; `auto`: as stored, and FP32 where FP4 is stored.

    Raises:
        ValueError: a checkpoint that is quantised otherwise, incomplete, or does not fit its config.
    """
    if quantization_of(directory) is None:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        return model
    dtype = torch.float32 if dtype == "auto" else dtype
    config = plain_config(directory)
    weights = FP4Checkpoint(directory, empty_model(config))
    state = {name: weights[name].to(dtype) for name in weights}
    return build_model(config, state, dtype, generation=directory)


def build_model(
    config: PretrainedConfig, state: dict[str, Tensor], dtype: torch.dtype, *, generation: Path | None = None
) -> PreTrainedModel:
    """A model of `config` with these weights, which it takes over, and the generation config of a directory."""
    config.dtype = dtype
    cls = type(empty_model(config))
    model: PreTrainedModel = cls.from_pretrained(None, config=config, state_dict=state, dtype=dtype)
    if generation is not None and (generation / "generation_config.json").is_file():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(generation)
    return model
