"""`trace-fit env`: what is installed, what this machine has, and which way each component would take here, and why.

Plain lines that survive being pasted into a bug report. Nothing is loaded beyond the libraries themselves and nothing
is measured; `trace-fit bench` and `trace-fit probe` do that.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from trace_kernels.native import native_supported
from trace_lightning.models.resolve import PREPARED, cache_dir
from trace_lightning.version import __version__

_PACKAGES = (
    "torch",
    "triton",
    "lightning",
    "transformers",
    "torchao",
    "torchmetrics",
    "jsonargparse",
    "numpy",
    "safetensors",
)
_VARIABLES = (
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "TRITON_INTERPRET",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)
_VARIABLES_OF = ("NCCL_", "TRACE_LIGHTNING_", "HF_")
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD", re.IGNORECASE)
_EXTRA = re.compile(r"extra\s*==\s*['\"]([\w.-]+)['\"]")
_USERS_EXTRAS = ("flash-attn", "math", "data", "gym", "peft", "export", "loggers", "gguf")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Versions of Python, the system, this package and what it stands on; "missing" where there is none."""
    found = {"trace-lightning": __version__, "python": platform.python_version(), "system": platform.platform()}
    found |= {name: _version(name) or "missing" for name in _PACKAGES}
    return found | {"CUDA of torch": torch.version.cuda or "none (CPU build)", "NVIDIA driver": _driver() or "none"}


def _driver() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.split("\n")[0].strip() if done.returncode == 0 else None


def devices() -> list[dict[str, Any]]:
    """GPUs that torch sees, or the CPU."""
    if not torch.cuda.is_available():
        return [{"name": f"CPU, {os.cpu_count()} cores", "threads": f"{torch.get_num_threads()} threads of torch"}]
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        capability = f"sm_{properties.major}{properties.minor}"
        memory = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        found.append({"name": f"cuda:{index} {properties.name}", "capability": capability, "memory": memory})
    return found


def components(device: torch.device) -> Iterator[tuple[str, str, str]]:
    """(component, path, why) of everything that has more than one way to run."""
    if device.type != "cuda":
        yield "rollout kernels", "emulated", "no GPU: torch computes the same numbers as the Triton kernels, slowly"
        yield "FP4 weights", "emulated", "matmuls read the dequantised BF16 copy"
        yield "FP4 KV cache", "emulated", "pages are packed; attention unpacks them with torch"
        yield "CUDA graphs", "off", "no GPU"
        yield "native FP4 matmul", "off", "no GPU"
        return
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 0):
        yield "rollout kernels", "not supported", f"sm_{major}{minor}: the kernels need sm_80 (BF16) or newer"
        return
    yield "rollout kernels", "triton", f"sm_{major}{minor}"
    yield (
        "FP4 weights",
        "unpacked",
        "codes are unpacked in registers up to a number of rows that is timed, then a BF16 copy",
    )
    yield "FP4 KV cache", "unpacked", "decode attention unpacks codes to FP16 in registers"
    yield (
        "FP4 activations",
        "emulated",
        "rounded by the kernel before each linear, multiplied in BF16: no gain in speed",
    )
    yield "CUDA graphs", "on", "decode steps and weight syncs, for families of the fused decoder with static RoPE"
    if native_supported(device):
        yield "native FP4 matmul", "off", "this card has it; the kernel is compiled for it and not verified on hardware"
    else:
        yield "native FP4 matmul", "off", f"sm_{major}{minor} has no FP4 tensor cores (sm_100 and sm_120 have)"


def extras() -> dict[str, dict[str, str | None]]:
    """{extra: {package: version, or None if missing}} of the optional parts a user may install."""
    found: dict[str, dict[str, str | None]] = defaultdict(dict)
    for requirement in importlib.metadata.requires("trace-lightning") or []:
        extra, name = _EXTRA.search(requirement), re.match(r"[\w.-]+", requirement)
        if extra and name and extra[1] in _USERS_EXTRAS:
            found[extra[1]][name[0]] = _version(name[0])
    return dict(found)


def variables() -> dict[str, str]:
    """Environment variables that change what happens; values of secrets are not shown."""
    names = sorted(n for n in os.environ if n in _VARIABLES or n.startswith(_VARIABLES_OF))
    return {name: "(set)" if _SECRET.search(name) else os.environ[name] for name in names}


def collect() -> dict[str, Any]:
    """Everything, as plain data."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    prepared = [name for name, folder in PREPARED.items() if (cache_dir() / folder / "config.json").is_file()]
    installed = _version("trace-lightning") is not None
    return {
        "versions": versions(),
        "devices": devices(),
        "components": [{"component": c, "path": p, "why": w} for c, p, w in components(device)],
        "extras": extras() if installed else {},
        "variables": variables(),
        "models": {"cache": str(cache_dir()), "prepared": prepared},
    }


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The report, line by line."""
    yield "### versions"
    yield from (f"{name}: {version}" for name, version in found["versions"].items())
    yield "### devices"
    yield from (", ".join(str(value) for value in device.values()) for device in found["devices"])
    yield "### which way each component takes here"
    yield from (f"{row['component']}: {row['path']} ({row['why']})" for row in found["components"])
    yield "### extras"
    for extra, packages in found["extras"].items():
        missing = [name for name, version in packages.items() if version is None]
        have = ", ".join(f"{name} {version}" for name, version in packages.items() if version is not None)
        way = f"missing {', '.join(missing)}: pip install 'trace-lightning[{extra}]'" if missing else ""
        yield f"{extra}: {'; '.join(part for part in (have, way) if part)}"
    if not found["extras"]:
        yield "unknown: trace-lightning is imported from a folder and not installed"
    yield "### models"
    yield f"prepared in {found['models']['cache']}: {', '.join(found['models']['prepared']) or 'none'}"
    yield "### environment variables"
    yield from (f"{name}={value}" for name, value in found["variables"].items())


def main(arguments: list[str]) -> None:
    """Print the report, as lines or as JSON."""
    parser = argparse.ArgumentParser(prog="trace-fit env", description="What to paste into a bug report.")
    parser.add_argument("--json", action="store_true", help="as JSON")
    found = collect()
    print(json.dumps(found, indent=1) if parser.parse_args(arguments).json else "\n".join(lines(found)))
