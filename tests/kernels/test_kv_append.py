"""QK-norm, RoPE, rotation and quantised store in one launch: against transformers' functions and the pages' bytes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from numerics import assert_bit_equal, assert_no_worse_than_torch
from trace_kernels import FP8, MXFP4, NVFP4, BlockFormat
from trace_kernels.hadamard import rotate
from trace_kernels.kv_append import kv_append, kv_append_reference, kv_append_triton
from trace_kernels.kv_pages import KVPages
from trace_kernels.rows import format_words

SIX, FOUR_OVER_SIX = NVFP4(), NVFP4(four_over_six=True)
FORMATS = {"nvfp4": SIX, "four_over_six": FOUR_OVER_SIX, "mxfp4": MXFP4(), "fp8": FP8(), "none": None}
EPS = 1e-6
HEADS, KV_HEADS, PAGE = 2, 1, 16
DTYPES = {  # gains and cos, compute
    "mixed": (torch.float32, torch.bfloat16),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float32, torch.float16),
    "all fp16": (torch.float16, torch.float16),
    "fp32": (torch.float32, torch.float32),
}


@dataclass
class Inputs:
    parts: Tensor
    gains: tuple[Tensor | None, Tensor | None]
    cos: Tensor
    sin: Tensor
    slots: Tensor
    k: KVPages
    v: KVPages
    heads: int
    dtype: torch.dtype
    rotated: bool

    def call(self, function) -> Tensor:
        """Run the reference or the launcher, both of which take flat tensors."""
        k, v = self.k, self.v
        return function(
            *(self.parts, *self.gains, EPS, self.cos, self.sin, self.slots),
            *(k.data, k.scale, k.outer, v.data, v.scale, v.outer),
            *(self.heads, self.dtype, self.rotated, *format_words(k.fmt)),
        )

    def public(self) -> Tensor:
        rest = {"num_heads": self.heads, "dtype": self.dtype, "rotated": self.rotated}
        return kv_append(self.parts, *self.gains, EPS, self.cos, self.sin, self.slots, self.k, self.v, **rest)

    def twin(self, device: str | None = None) -> Inputs:
        def move(t: Tensor | None) -> Tensor | None:
            return None if t is None else t.clone().to(device or t.device)

        pages = [KVPages(p.fmt, move(p.data), move(p.scale), move(p.outer), p.head_dim) for p in (self.k, self.v)]
        tensors = (move(self.parts), tuple(map(move, self.gains)), move(self.cos), move(self.sin), move(self.slots))
        return Inputs(*tensors, *pages, self.heads, self.dtype, self.rotated)


def make(
    head_dim: int,
    fmt: BlockFormat | None,
    *,
    dtypes: str = "fp32",
    normed: bool = False,
    rotated: bool = False,
    tokens: int = 3,
    heads: tuple[int, int] = (HEADS, KV_HEADS),
    splits: int = 2,
) -> Inputs:
    stream, dtype = DTYPES[dtypes]
    query, kv = heads
    # Small integers over 4: squares add up exactly in any order, so a norm's bytes can be compared.
    parts = torch.randint(-6, 7, (splits, tokens, (query + 2 * kv) * head_dim)) / 4
    gains = (None, None)
    if normed:
        gains = tuple((1 + 0.2 * torch.randn(head_dim)).to(stream) for _ in range(2))
    angles = 3 * torch.randn(tokens, head_dim // 2).repeat(1, 2)
    num_pages = -(-2 * tokens // PAGE) + 1
    slots = torch.randperm(num_pages * PAGE)[:tokens]
    make_pages = {"num_pages": num_pages, "page_size": PAGE, "num_heads": kv, "head_dim": head_dim}
    pages = [KVPages.empty(fmt, **make_pages, dtype=dtype, device="cpu") for _ in range(2)]
    for p in pages:
        p.data.fill_(1)  # what must stay
        if p.outer is not None:
            p.outer.copy_(2.0 ** -torch.randint(2, 7, (kv, 1)))
    cos, sin = angles.cos().to(stream), angles.sin().to(stream)
    return Inputs(parts, gains, cos, sin, slots, *pages, query, dtype, rotated)


def assert_same_pages(ours: Inputs, expected: Inputs) -> None:
    for left, right in ((ours.k, expected.k), (ours.v, expected.v)):
        assert_bit_equal(left.data.cpu(), right.data.cpu())
        if right.scale is not None:
            assert_bit_equal(left.scale.cpu(), right.scale.cpu())


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "qk-norm"])
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_reference_is_the_unfused_forward(name, dtypes, normed):
    given = make(32, FORMATS[name], dtypes=dtypes, normed=normed, rotated=name == "nvfp4")
    qkv = (given.parts[0] + given.parts[1]).to(given.dtype).unflatten(-1, (-1, 32))
    q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    if normed:
        norms = [Qwen3RMSNorm(32, EPS) for _ in range(2)]
        for norm, gain in zip(norms, given.gains, strict=True):
            norm.weight = torch.nn.Parameter(gain, requires_grad=False)
        q, k = norms[0](q), norms[1](k)
    q, k = apply_rotary_pos_emb(q, k, given.cos, given.sin)
    if given.rotated:
        q, k = rotate(q), rotate(k)
    expected = given.twin()
    for pages, x in ((expected.k, k), (expected.v, v)):
        if pages.fmt is None:
            pages.store_values(given.slots, x)
        else:
            pages.store(given.slots, pages.fmt.quantize(x, pages.outer))
    assert_bit_equal(given.public(), q)
    assert_same_pages(given, expected)


@pytest.mark.parametrize("rotated", [False, True], ids=["plain", "hadamard"])
@pytest.mark.parametrize("head_dim", [16, 80, 96, 128])
@pytest.mark.parametrize("name", FORMATS)
def test_kernel_has_the_bytes_of_the_reference(name, head_dim, rotated):
    ours = make(head_dim, FORMATS[name], rotated=rotated, splits=3)
    expected = ours.twin()
    assert_bit_equal(ours.call(kv_append_triton), expected.call(kv_append_reference))
    assert_same_pages(ours, expected)


@pytest.mark.parametrize("dtypes", ["fp32", "fp16", "all fp16"])
@pytest.mark.parametrize("name", ["nvfp4", "none"])
def test_kernel_follows_the_casts_of_the_norm(name, dtypes):
    ours = make(64, FORMATS[name], dtypes=dtypes, normed=True)
    expected = ours.twin()
    assert_bit_equal(ours.call(kv_append_triton), expected.call(kv_append_reference))
    assert_same_pages(ours, expected)


def exact_queries(given: Inputs) -> Tensor:
    """Normed and rotary-embedded queries in FP64."""
    head_dim = given.cos.shape[1]
    x = given.parts.double().sum(0).unflatten(-1, (-1, head_dim))[:, : given.heads]
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * given.gains[0].double()
    first, second = x.chunk(2, dim=-1)
    return x * given.cos.double()[:, None] + torch.cat((-second, first), -1) * given.sin.double()[:, None]


def test_kernel_norm_is_no_worse_than_torch():
    ours = make(40, None, normed=True)
    ours.parts = torch.randn_like(ours.parts)
    torchs = ours.twin().call(kv_append_reference)
    assert_no_worse_than_torch(ours.call(kv_append_triton), torchs, exact_queries(ours))


@pytest.mark.parametrize("function", [kv_append_reference, kv_append_triton], ids=["reference", "kernel"])
def test_inactive_rows_are_not_stored(function):
    given = make(32, SIX)
    before = given.twin()
    given.slots[:] = -1
    q = given.call(function)
    assert_same_pages(given, before)
    assert q.shape == (3, HEADS, 32)
    given.slots[1] = 5
    given.call(function)
    changed = (given.k.data != before.k.data).any(-1).nonzero()
    assert changed.tolist() == [[0, 0, 5]]


def test_several_kv_heads_and_one_token():
    ours = make(32, FOUR_OVER_SIX, tokens=1, heads=(4, 2), normed=True)
    expected = ours.twin()
    assert_bit_equal(ours.call(kv_append_triton), expected.call(kv_append_reference))
    assert_same_pages(ours, expected)


def test_mismatched_arguments_are_refused():
    given = make(40, SIX, rotated=True)
    with pytest.raises(ValueError, match="a multiple of 16"):
        given.public()
    given = make(32, SIX)
    given.heads = 3
    with pytest.raises(ValueError, match="do not belong to 3"):
        given.public()
    given = make(32, SIX, normed=True)
    given.gains = (given.gains[0], None)
    with pytest.raises(ValueError, match="or neither"):
        given.public()
    given = make(32, SIX)
    given.v.fmt = FP8()
    with pytest.raises(ValueError, match="one format"):
        given.public()


def test_operator_keeps_its_promises_to_the_compiler():
    given = make(32, SIX, dtypes="fp16", normed=True)
    k, v = given.k, given.v
    arguments = (
        *(given.parts, *given.gains, EPS, given.cos, given.sin, given.slots),
        *(k.data, k.scale, k.outer, v.data, v.scale, v.outer, given.heads, given.dtype, False, "nvfp4", False),
    )
    # Not the tests that trace with symbols: which tokens are active is data, and the CPU twin looks at it.
    torch.library.opcheck(
        torch.ops.trace_kernels.kv_append.default, arguments, test_utils=("test_schema", "test_faketensor")
    )


def test_compiled_call_stores_the_same():
    eager = make(32, SIX, normed=True)
    compiled = eager.twin()
    expected = eager.public()
    assert_bit_equal(torch.compile(lambda: compiled.public(), fullgraph=True, backend="aot_eager")(), expected)
    assert_same_pages(compiled, eager)


@pytest.mark.gpu
@pytest.mark.parametrize("rotated", [False, True], ids=["plain", "hadamard"])
@pytest.mark.parametrize("dtypes", ["mixed", "bf16"])
@pytest.mark.parametrize("name", FORMATS)
def test_gpu_has_the_bytes_of_the_cpu(name, dtypes, rotated):
    expected = make(128, FORMATS[name], dtypes=dtypes, rotated=rotated, tokens=64, heads=(32, 8))
    ours = expected.twin("cuda")
    assert_bit_equal(ours.public().cpu(), expected.public())
    assert_same_pages(ours, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_gpu_normed_keys_are_quantised_as_their_values(head_dim):
    values = make(head_dim, None, normed=True, tokens=32, heads=(8, 4)).twin("cuda")
    codes = values.twin()
    pages = {"num_pages": values.k.data.shape[0], "page_size": PAGE, "num_heads": 4, "head_dim": head_dim}
    codes.k, codes.v = (KVPages.empty(SIX, **pages, dtype=torch.float32, device="cuda") for _ in range(2))
    torchs = values.twin().call(kv_append_reference)
    q = values.public()
    assert_bit_equal(codes.public(), q)
    assert_no_worse_than_torch(q, torchs, exact_queries(values))
    expected = SIX.quantize(values.k.read(values.slots, torch.float32), codes.k.outer)
    stored = codes.k.quantized(codes.slots)
    assert_bit_equal(stored.codes, expected.codes)
    assert_bit_equal(stored.scale, expected.scale)


@pytest.mark.gpu
def test_gpu_graph_and_compiler_give_the_same():
    given = make(128, SIX, dtypes="mixed", normed=True, tokens=8, heads=(8, 2)).twin("cuda")
    eager, compiled, replayed = given.twin(), given.twin(), given.twin()
    expected = eager.public()
    assert_bit_equal(torch.compile(lambda: compiled.public(), fullgraph=True)(), expected)
    assert_same_pages(compiled, eager)
    replayed.slots.fill_(-1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = replayed.public()
    replayed.slots.copy_(given.slots)
    graph.replay()
    assert_bit_equal(q, expected)
    assert_same_pages(replayed, eager)
