"""Every example runs as its first lines say, and stays a size that fits a screen or two."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
ARGUMENTS = {
    "train_without_cli": ["--steps", "2"],
    "custom_reward": ["--steps", "2"],
    "custom_loss": ["--steps", "2"],
    "guidance_parity": ["--tokens", "8", "--sequences", "2", "--out", "parity.json"],
    "pretrain_tiny": ["--steps", "3", "--out", "tiny"],
}


def test_no_example_is_forgotten():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(ARGUMENTS)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_example(name, tmp_path):
    path = EXAMPLES / f"{name}.py"
    done = subprocess.run(
        [sys.executable, str(path), *ARGUMENTS[name]], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout


@pytest.mark.parametrize("name", ["train_without_cli", "custom_reward", "custom_loss"])
def test_user_examples_are_short(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 80
