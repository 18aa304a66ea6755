"""FP4 linear: decoding is exact, sums are as good as torch's, and a token does not see its neighbours."""

from __future__ import annotations

import re

import pytest
import torch

from numerics import assert_bit_equal, assert_no_worse_than_torch
from trace_kernels import get_format, linear, pack_codes, unpack_codes
from trace_kernels.crossover import crossover_batch
from trace_kernels.formats import e2m1_decode, e4m3_decode
from trace_kernels.launch import INTERPRET
from trace_kernels.linear import Tile
from trace_kernels.quantize import Quantized

FORMATS = ["nvfp4", "mxfp4"]
interpreted = pytest.mark.skipif(not INTERPRET, reason="runs kernels on CPU tensors, in Triton's interpreter")


def small_tile(words):
    return Tile(rows=16, words=words, warps=1, stages=2, programs=1)


def quantized_weight(rows, width, fmt, device="cpu"):
    """(qdata, scale, outer) and the FP64 values."""
    block_format = get_format(fmt)
    w = torch.randn(rows, width, device=device) * 0.1
    q = block_format.quantize(w, block_format.outer_from_amax(w.abs().amax().view(1, 1)))
    return (pack_codes(q.codes), q.scale, q.outer), block_format.dequantize(q).double()


def arbitrary_weight(rows, width, fmt, bytes_from, bytes_to, device="cpu"):
    """Every code under scale bytes of a range, and the FP32 values."""
    qdata = torch.randint(0, 256, (rows, width // 2), dtype=torch.uint8, device=device)
    scale = torch.randint(
        bytes_from, bytes_to, (rows, width // linear.BLOCK_SIZE[fmt]), dtype=torch.uint8, device=device
    )
    outer = torch.full((1, 1), 2.0**-9, device=device) if fmt == "nvfp4" else None
    values = get_format(fmt).dequantize(Quantized(unpack_codes(qdata), scale, outer, width))
    return (qdata, scale, outer), values + 0.0  # -0, as a sum would have it, becomes 0


def execute(assembly, words, scales):
    """Run the kernel's PTX in Python: the eight registers that one invocation returns."""
    registers = {"$8": words[0], "$9": words[1], "$10": scales[0], "$11": scales[1]}
    products = {}

    def number(token):
        return registers[token] if token in registers else int(token, 0)

    for line in re.findall(r"(\S+ [^;{}]+);", assembly.split(";", 1)[1]):
        operation, rest = line.split(" ", 1)
        target, *operands = (token.strip() for token in rest.split(","))
        if operation.startswith("mul"):
            products[int(target[1:])] = tuple(number(token) for token in operands)
            continue
        a, b, *c = (number(token) for token in operands)
        registers[target] = {
            "prmt.b32": lambda a=a, b=b, c=c: {
                0x5410: (a & 0xFFFF) | (b & 0xFFFF) << 16,
                0x7632: (a >> 16) | (b >> 16) << 16,
            }[c[0]],
            "shl.b32": lambda a=a, b=b: a << b & 0xFFFFFFFF,
            "shr.u32": lambda a=a, b=b: a >> b,
            "and.b32": lambda a=a, b=b: a & b,
            "lop3.b32": lambda a=a, b=b, c=c: {0xEA: (a & b) | c[0]}[c[1]],
        }[operation]()
    return [products[j] for j in range(8)]


def as_float(bits, dtype):
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(dtype).double()


@pytest.mark.parametrize(
    ("assembly", "dtype", "scale_bits"),
    [
        (linear._UNPACK_BF16.value, torch.bfloat16, lambda byte: byte * 16 + 0x7700),
        (linear._UNPACK_FP16.value, torch.float16, lambda byte: byte * 128 + 0x3800),
    ],
    ids=["bf16", "fp16"],
)
def test_assembly(assembly, dtype, scale_bits):
    for trial in range(120):
        words = torch.randint(0, 2**32, (2,)).tolist()
        byte = [0x08 + trial % 119, 0x7E - trial % 119]  # every normal code once
        for j, (value, scale) in enumerate(execute(assembly, words, [scale_bits(b) for b in byte])):
            for half in (0, 1):
                product = as_float(value >> 16 * half & 0xFFFF, dtype) * as_float(scale >> 16 * half & 0xFFFF, dtype)
                code = torch.tensor(words[half] >> 4 * j & 15, dtype=torch.uint8)
                exact = e2m1_decode(code) * e4m3_decode(torch.tensor([byte[half]], dtype=torch.uint8))
                assert product == exact * 2.0**-8
                assert product.to(dtype) == product


@pytest.mark.parametrize("shape", [(3, 128), (1, 40), (5, 300)], ids=str)
def test_permutation(shape):
    x = torch.randn(shape)
    xp = linear.permute_activations_reference(x)
    padded = torch.nn.functional.pad(x, (0, -shape[1] % 128))
    for kb, j, m, w in ((0, 0, 0, 0), (0, 7, shape[0] - 1, 3), (xp.shape[0] - 1, 2, 0, 15)):
        assert xp[kb, j, m, w] == padded[m, 128 * kb + 8 * w + j]
    assert xp.count_nonzero() == x.count_nonzero()
    assert_bit_equal(linear.permute_activations(x), xp)
    if INTERPRET:
        assert_bit_equal(linear.permute_activations_triton(x), xp)


@interpreted
@pytest.mark.parametrize("words", [16, 32])
@pytest.mark.parametrize(("fmt", "bytes_from", "bytes_to"), [("nvfp4", 0x08, 0x7F), ("mxfp4", 112, 130)])
def test_decoding_is_exact(fmt, bytes_from, bytes_to, words):
    weight, values = arbitrary_weight(32, 128, fmt, bytes_from, bytes_to)
    identity = linear.permute_activations(torch.eye(128).half())
    parts = linear.launch(small_tile(words), 1, identity, *weight, None, in_features=128, fmt=fmt)
    assert_bit_equal(parts[0], values.T.contiguous())


@interpreted
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("words", [16, 32])
@pytest.mark.parametrize(
    ("tokens", "rows", "width", "splits"), [(8, 32, 512, 2), (3, 20, 264, 1), (17, 16, 400, 2), (70, 16, 128, 1)]
)
def test_sums(fmt, words, tokens, rows, width, splits):
    weight, w = quantized_weight(rows, width, fmt)
    x = torch.randn(tokens, width).half()
    bias = torch.randn(rows)
    xp = linear.permute_activations(x)
    parts = linear.launch(small_tile(words), splits, xp, *weight, bias, in_features=width, fmt=fmt)
    assert parts.shape == (splits, tokens, rows)
    torch_low = x.float() @ w.T.float() + bias
    assert_no_worse_than_torch(parts.sum(0), torch_low, x.double() @ w.T + bias.double(), factor=4)
    assert_bit_equal(linear.fp4_linear(xp, *weight, bias, in_features=width, fmt=fmt)[0], torch_low)


@interpreted
def test_a_token_does_not_see_its_neighbours():
    weight, _ = quantized_weight(16, 256, "nvfp4")
    x = torch.randn(8, 256).half()
    settings = {"in_features": 256, "fmt": "nvfp4"}
    alone = linear.fp4_linear_triton(linear.permute_activations(x[2:3]), *weight, None, **settings)
    x[0], x[5] = float("nan"), 60000
    together = linear.fp4_linear_triton(linear.permute_activations(x), *weight, None, **settings)
    assert_bit_equal(together[:, 2], alone[:, 0])
    assert together[:, 0].isnan().all()


@interpreted
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy, in the interpreter
def test_a_diverged_weight_shows(fmt, bad):
    block_format = get_format(fmt)
    w = torch.randn(16, 128)
    w[3, 5] = bad
    q = block_format.quantize(w, block_format.outer_from_amax(w.abs().amax().view(1, 1)))
    xp = linear.permute_activations(torch.randn(8, 128).half())
    parts = linear.fp4_linear_triton(xp, pack_codes(q.codes), q.scale, q.outer, None, in_features=128, fmt=fmt)
    assert not parts[..., 3].isfinite().any()


@interpreted
def test_zero_weights():
    q = get_format("mxfp4").quantize(torch.zeros(16, 128))
    assert q.scale.max() == 1  # far below what FP16 holds
    bias = torch.randn(16).half()
    xp = linear.permute_activations(torch.randn(2, 128).half())
    parts = linear.fp4_linear_triton(xp, pack_codes(q.codes), q.scale, None, bias, in_features=128, fmt="mxfp4")
    assert_bit_equal(parts.sum(0), bias.float().expand(2, 16).contiguous())


@pytest.mark.parametrize("tokens", [1, 8, 9, 32, 64, 200])
@pytest.mark.parametrize("shape", [(24576, 4096), (4096, 12288), (2048, 2048), (19456, 2560), (64, 40)], ids=str)
def test_launch_plan(tokens, shape):
    rows, width = shape
    tile, splits = linear.launch_plan(tokens, rows, width, torch.device("cpu"))
    steps = -(-width // (8 * tile.words))
    per_split = -(-steps // splits)
    assert (splits - 1) * per_split < steps <= splits * per_split  # all of K, and no split idle
    assert splits == 1 or 4 * splits * linear.tile_tokens(tokens, torch.device("cpu")) * rows <= 0.3 * rows * width


def test_layers_compile_whole():
    weight, _ = quantized_weight(16, 128, "nvfp4")

    def layer(x, qdata, scale, outer):
        xp = linear.permute_activations(x)
        return linear.fp4_linear(xp, qdata, scale, outer, None, in_features=128, fmt="nvfp4").sum(0)

    x = torch.randn(4, 128)
    assert_bit_equal(torch.compile(layer, fullgraph=True, backend="eager")(x, *weight), layer(x, *weight))


def test_refusals():
    weight, _ = quantized_weight(16, 128, "nvfp4")
    xp = linear.permute_activations(torch.randn(2, 128))
    with pytest.raises(ValueError, match="not 'fp8'"):
        linear.fp4_linear(xp, *weight, None, in_features=128, fmt="fp8")
    with pytest.raises(ValueError, match="xp is"):
        linear.fp4_linear(xp, *weight, None, in_features=256, fmt="nvfp4")
    with pytest.raises(ValueError, match="scale is"):
        linear.fp4_linear(xp, *weight, None, in_features=128, fmt="mxfp4")
    with pytest.raises(ValueError, match="contiguous"):
        linear.fp4_linear(xp, weight[0].T.contiguous().T, *weight[1:], None, in_features=128, fmt="nvfp4")
    assert linear.supports(40, "mxfp4") is None
    assert "in_features" in linear.supports(0, "nvfp4")


def test_no_crossover_on_a_cpu():
    weight, w = quantized_weight(16, 128, "nvfp4")
    assert crossover_batch(*weight, w.bfloat16(), fmt="nvfp4", in_features=128) == 0


@pytest.mark.gpu
@pytest.mark.parametrize(("fmt", "bytes_from", "bytes_to"), [("nvfp4", 0x08, 0x7F), ("mxfp4", 20, 137)])
def test_decoding_is_exact_on_a_gpu(fmt, bytes_from, bytes_to):
    weight, values = arbitrary_weight(1024, 256, fmt, bytes_from, bytes_to, "cuda")
    identity = linear.permute_activations(torch.eye(256, device="cuda", dtype=torch.bfloat16))
    parts = linear.fp4_linear(identity, *weight, None, in_features=256, fmt=fmt)
    assert_bit_equal(parts.sum(0), values.T.contiguous())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("fmt", "tokens", "rows", "width"),
    [
        ("nvfp4", 8, 24576, 4096),
        ("nvfp4", 1, 17000, 1000),
        ("nvfp4", 16, 4096, 12288),
        ("mxfp4", 8, 6144, 4096),
        ("nvfp4", 29, 2560, 9728),
        ("nvfp4", 64, 2048, 2048),
        ("mxfp4", 100, 1000, 300),
    ],
)
def test_sums_on_a_gpu(fmt, tokens, rows, width):
    weight, w = quantized_weight(rows, width, fmt, "cuda")
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    x[0] *= 1e6  # far beyond FP16
    bias = torch.randn(rows, device="cuda", dtype=torch.bfloat16)
    xp = linear.permute_activations(x)
    assert_bit_equal(xp, linear.permute_activations_reference(x))
    parts = linear.fp4_linear(xp, *weight, bias, in_features=width, fmt=fmt)
    expected = x.double() @ w.T + bias.double()
    torch_low = torch.nn.functional.linear(x, w.bfloat16(), bias)
    ours = parts.sum(0).bfloat16()
    for some in [slice(0, 1), slice(1, None)][: min(tokens, 2)]:  # the huge token apart from the others
        assert_no_worse_than_torch(ours[some], torch_low[some], expected[some], factor=1.25)


@pytest.mark.gpu
def test_tokens_are_independent_on_a_gpu():
    weight, _ = quantized_weight(4096, 4096, "nvfp4", "cuda")
    x = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16)
    settings = {"in_features": 4096, "fmt": "nvfp4"}
    together = linear.fp4_linear(linear.permute_activations(x), *weight, None, **settings)
    some = linear.fp4_linear(linear.permute_activations(x[2:11]), *weight, None, **settings)
    assert_bit_equal(together[:, 2:11].contiguous(), some)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # torch.compile's advice
def test_compiled_and_captured():
    weight, _ = quantized_weight(4096, 4096, "nvfp4", "cuda")
    x = torch.randn(8, 4096, device="cuda", dtype=torch.bfloat16)

    def layer(x):
        xp = linear.permute_activations(x)
        return linear.fp4_linear(xp, *weight, None, in_features=4096, fmt="nvfp4")

    eager = layer(x)
    assert_bit_equal(torch.compile(layer, fullgraph=True)(x), eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(x)
    captured.fill_(float("nan"))
    graph.replay()
    assert_bit_equal(captured, eager)
    x.neg_()
    graph.replay()
    assert_bit_equal(captured, -eager)


@pytest.mark.gpu
def test_crossover_on_a_gpu():
    weight, w = quantized_weight(6144, 4096, "nvfp4", "cuda")
    found = crossover_batch(*weight, w.bfloat16(), fmt="nvfp4", in_features=4096)
    assert found in (8, 16, 32, 64, 128)
    assert crossover_batch(*weight, w.bfloat16(), fmt="nvfp4", in_features=4096) == found
