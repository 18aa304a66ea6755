"""examples/support/syndromes.py: the codes repair what they promise, exactly, and a trainer guided by them agrees."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from pathlib import Path

import pytest
import torch

import scripts
from trace_kernels import NVFP4, pack_bits, pack_codes
from trace_lightning.quantization.guidance import GuidanceRecord, GuidanceRows, SiteTable
from trace_lightning.recipe import GuidanceConfig

EXAMPLES = Path(__file__).parent.parent / "examples"
DISTANCES = {"one_in_2": 10, "one_in_3": 7, "one_in_4": 6, "one_in_6": 4, "four_of_8": 4, "five_of_16": 4}


@pytest.fixture(scope="module")
def syndromes():
    """The example's module, under a name that dataclasses find."""
    spec = importlib.util.spec_from_file_location("syndromes", EXAMPLES / "support" / "syndromes.py")
    module = sys.modules["syndromes"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["syndromes"]


def test_a_check_is_the_sum_of_what_its_columns_name(syndromes):
    """The drawing at the top of the file: two periods, checks 0 to 4."""
    code = syndromes.SyndromeCode((9, 14, 5), 4)
    members = [{0, 2}, {1, 3, 5}, {1, 2, 4}, {0, 1, 4, 5}, {3, 4}]
    bits = torch.tensor(list(itertools.product((0, 1), repeat=6)), dtype=torch.uint8)
    wanted = torch.stack([bits[:, list(elements)].sum(1) % 2 for elements in members], dim=1).bool()
    assert torch.equal(code.syndrome(bits), wanted)


@pytest.mark.parametrize("name", DISTANCES)
def test_repairs_are_the_cheapest_there_are(syndromes, name):
    """Against all 65,536 rows of 16 bits."""
    code, generator = syndromes.CODES[name], torch.Generator().manual_seed(0)
    sent, own = torch.randint(0, 2, (2, 12, 16), generator=generator, dtype=torch.uint8)
    cost, syndrome = torch.rand(12, 16, generator=generator), code.syndrome(sent)
    assert syndrome.shape == (12, code.num_checks(16))
    decoded = code.decode(own, cost, syndrome)
    everything = torch.tensor(list(itertools.product((0, 1), repeat=16)), dtype=torch.uint8)
    its_syndromes = code.syndrome(everything)
    for row in range(12):
        allowed = everything[(its_syndromes == syndrome[row]).all(1)]
        cheapest = ((allowed ^ own[row]) * cost[row]).sum(1).argmin()
        assert torch.equal(decoded[row], allowed[cheapest])


@pytest.mark.parametrize(("name", "distance"), DISTANCES.items())
def test_fewer_flips_than_half_the_distance_are_repaired(syndromes, name, distance, monkeypatch):
    """Wherever they are, near together or at the ends, and however rows are cut into chunks; one more is too many."""
    code, generator, most = syndromes.CODES[name], torch.Generator().manual_seed(0), (distance - 1) // 2
    monkeypatch.setattr(syndromes, "DECISION_BYTES", 1000 * 48 << code.height)
    sent = torch.randint(0, 2, (4096, 48), generator=generator, dtype=torch.uint8)
    own, start = sent.clone(), torch.randint(0, 48, (4096,), generator=generator)
    for _ in range(most):
        at = (start + torch.randint(0, 16, (4096,), generator=generator)).clamp(max=47)
        own[torch.arange(4096), at] = 1 - sent[torch.arange(4096), at]
    decoded = code.decode(own, torch.ones(4096, 48), code.syndrome(sent))
    assert torch.equal(decoded, sent)
    words = torch.tensor(list(itertools.product((0, 1), repeat=16)), dtype=torch.uint8)
    words = words[~code.syndrome(words).any(1)].sum(1)
    assert int(words[words > 0].min()) >= distance, "two rows with the same syndrome are this far apart"


@pytest.mark.parametrize(("site", "scales"), [("mlp_in", "whole"), ("mlp_in", "parity"), ("v", "parity")])
def test_a_trainer_recovers_the_codes_from_syndromes(syndromes, site, scales):
    """Noise of 1 % flips codes under nearest rounding and none here; rows may come twice, and some tokens have none."""
    generator, fmt = torch.Generator().manual_seed(0), NVFP4()
    x = torch.randn((32, 3, 64) if site == "v" else (32, 192), generator=generator)
    shared = torch.full((3, 1), 2.0**-8) if site == "v" else None
    q = fmt.quantize(x, shared)
    codes, scale = pack_bits(q.codes & 1), pack_bits(q.scale & 1) if scales == "parity" else q.scale
    table = SiteTable(scale, codes, q.outer.squeeze(-1), pack_codes(q.codes))
    config = GuidanceConfig(mode="parity", scales=scales)
    record = GuidanceRecord(config, {(0, site): table}, torch.arange(32), policy_version=0)
    row_of_token = torch.tensor([[*range(32), -1, 5]])
    rows = GuidanceRows.from_rows(record, row_of_token, torch.device("cpu"))
    tokens = x[row_of_token[0]] * (1 + 0.01 * torch.randn((34, *x.shape[1:]), generator=generator))
    values = syndromes.SyndromeRounding(rows).values(0, site, tokens, fmt, shared)
    expected = fmt.dequantize(q)
    assert torch.equal(values[:32], expected)
    assert torch.equal(values[33], expected[5])
    assert torch.equal(values[32:33], fmt.dequantize(fmt.quantize(tokens[32:33], shared))), "no row: to nearest"
    assert rows.mismatch.compute()["before"] > 0.001
    assert rows.mismatch.compute()["after"] == 0
    checks = 192 // 4 + 6  # 54 bits
    scales_take = 12 if scales == "whole" else 3 if site == "v" else 2
    assert syndromes.SyndromeRounding.bytes_per_token(record) == -(-checks // 8) + scales_take + (site != "v")


def test_the_study_has_them_as_arms(tmp_path):
    """Named, they run under drift as well; W4A16KV4 of the embedded policy takes 28 bytes per token, not 96."""
    arms = ("floor", "one_in_4", "six_one_in_2_whole", "one_in_4_after_4")
    done = scripts.run(
        EXAMPLES / "guidance_study.py",
        *("--model", "builtin:tiny-qwen3", "--lengths", "8", "--sequences", "2", "--drift", "0", "1"),
        *("--rollouts", "BF16", "W4A16KV4", "--json", "study.json", "--arms", *arms),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "study.json").read_text())["rows"]
    sizes = {row["name"]: row["value"] for row in rows if row["name"].endswith("bytes_per_token")}
    for steps in (0, 1):
        assert sizes[f"W4A16KV4/one_in_4/{steps} steps/8 tokens/bytes_per_token"] == 28
        assert sizes[f"W4A16KV4/six_one_in_2_whole/{steps} steps/8 tokens/bytes_per_token"] == 68
        assert sizes[f"W4A16KV4/one_in_4_after_4/{steps} steps/8 tokens/bytes_per_token"] == 72
