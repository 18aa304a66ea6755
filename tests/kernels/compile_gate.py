"""Compile every Triton kernel for sm_90, sm_100 and sm_120 on a machine without a GPU, and look at the machine code.

Run as a script (`test_compile.py` does, once a session): the interpreter that the other tests use replaces `triton.jit`
for the whole process. Each `gate_<module>.py` beside this file lists its `CASES`; the script prints one JSON object,
case name -> architecture -> what was found.

    registers, shared bytes, local loads and stores (spills), names of the matrix instructions, and of the main loop
    (the one with the most matrix instructions; the longest where there are none) the instructions per element
"""

from __future__ import annotations

import concurrent.futures
import importlib
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ARCHITECTURES = (90, 100, 120)
MATRIX = re.compile(r"\w*(HMMA|QMMA|OMMA|HGMMA|QGMMA|UTC\w*MMA|IMMA)")
SHARED_LIMIT = {90: 232_448, 100: 232_448, 120: 101_376}  # bytes a program may have


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel with the types and constants of one launch.

    Args:
        name: unique; appears in the test's id.
        kernel: the `@triton.jit` function.
        signature: argument name -> type as Triton writes it (`*fp16`, `*u8`, `i32`, `fp32`), constexprs left out.
        constexprs: argument name -> value.
        options: num_warps, num_stages and the like.
        architectures: those it must compile for.
        matrix: regular expression that some matrix instruction must match, per architecture; absent: not checked.
        elements: elements one program handles in one turn of the main loop, for the instruction count.
        max_instructions: bound on instructions per element, per architecture.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    architectures: tuple[int, ...] = ARCHITECTURES
    matrix: dict[int, str] = field(default_factory=dict)
    elements: int = 0
    max_instructions: dict[int, float] = field(default_factory=dict)


def load_cases() -> list[Case]:
    folder = Path(__file__).parent
    sys.path.insert(0, str(folder))
    modules = [importlib.import_module(path.stem) for path in sorted(folder.glob("gate_*.py"))]
    cases = [case for module in modules for case in module.CASES]
    assert len({case.name for case in cases}) == len(cases), "two cases have one name"
    return cases


def compile_case(case: Case, arch: int) -> dict[str, Any]:
    """Compile one case; 16-byte aligned pointers and sizes, as the launcher would find them."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    constexprs = {(names.index(name),): value for name, value in case.constexprs.items()}
    aligned = [name for name, kind in case.signature.items() if kind.startswith("*")]
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    options = {"num_warps": 4, "num_stages": 3} | case.options
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return inspect(compiled.asm["cubin"], compiled.metadata, case, options)


def disassemble(cubin: bytes) -> str:
    """SASS by the nvdisasm that Triton's package carries."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-c", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def inspect(cubin: bytes, metadata: Any, case: Case, options: dict[str, Any]) -> dict[str, Any]:
    """Count what the tests bound."""
    lines = [line.strip() for line in disassemble(cubin).splitlines()]
    code = [line for line in lines if re.match(r"/\*[0-9a-f]{4,}\*/", line) or line.startswith(".L_")]
    ops = [_opcode(line) for line in code]
    found: dict[str, Any] = {
        "shared": metadata.shared,
        "spills": sum(op.startswith(("LDL", "STL")) for op in ops),
        "matrix": sorted({op for op in ops if MATRIX.match(op)}),
    }
    if case.elements:
        threads = 32 * options["num_warps"]
        found["instructions"] = round(_main_loop(code, ops) * threads / case.elements, 2)
    return found


def _opcode(line: str) -> str:
    match = re.search(r"\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", line)
    return match.group(1) if match else ""


def _main_loop(code: list[str], ops: list[str]) -> int:
    """Instructions in the loop with the most matrix instructions, the shortest such one; without any in the longest."""
    labels = {line.split(":")[0]: i for i, line in enumerate(code) if line.startswith(".L_")}
    best, longest = (0, 0), 0
    for end, line in enumerate(code):
        target = re.search(r"BRA(?:\.\w+)*\s+.*`\((\.L_\w+)\)", line)
        if not target or labels.get(target.group(1), end) >= end:
            continue
        body = ops[labels[target.group(1)] : end + 1]
        count = len([op for op in body if op and op != "NOP"])
        best, longest = max(best, (sum(bool(MATRIX.match(op)) for op in body), -count)), max(longest, count)
    return -best[1] if best[0] else longest


def main() -> None:
    """Print the findings of all cases whose name contains one of the arguments (all without arguments)."""
    cases = [case for case in load_cases() if not sys.argv[1:] or any(word in case.name for word in sys.argv[1:])]
    jobs = [(case, arch) for case in cases for arch in case.architectures]
    found: dict[str, dict[int, Any]] = {case.name: {} for case in cases}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for (case, arch), result in zip(jobs, pool.map(lambda job: compile_case(*job), jobs), strict=True):
            found[case.name][arch] = result
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
