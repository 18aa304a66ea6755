"""Programs of a policy: hostile ones end within their limits with a score and a reason, and harm nothing."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import sys
import tempfile
import time
from pathlib import Path

import pytest

from trace_lightning.tasks import CodeTests, Limits, confine, sandbox
from trace_lightning.tasks.code import program_of
from trace_lightning.types import Problem

LIMITS = Limits(seconds=2.0, memory_mb=256, file_mb=4)
SLACK = 3.0  # seconds beyond the limit that a loaded machine may take to start and end a process


@pytest.fixture(params=["as found", "without namespaces"])
def protected(request, monkeypatch) -> bool:
    """Whether programs have a file system of their own; the second case is that of most containers."""
    if request.param == "without namespaces":
        monkeypatch.setattr(sandbox, "protection", lambda: (False, "seccomp"))
        return False
    return sandbox.protection()[0]


def problem(*tests) -> Problem:
    return Problem(prompt="q", info={"tests": list(tests)})


def score(source: str, *tests, **settings):
    reward = CodeTests(**({"limits": LIMITS} | settings))
    begin = time.monotonic()
    result = reward(f"Here it is:\n```python\n{source}\n```\n", problem(*(tests or [{"stdin": "", "stdout": "done"}])))
    return result.value, result.reason, time.monotonic() - begin


HOSTILE = {
    "fork bomb": ("import os\nwhile True:\n    os.fork()", "PermissionError"),
    "fork bomb that goes on": (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        "time limit (2 s)",
    ),
    "thread bomb": (
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
        ("can't start new thread", "memory limit (256 MB)", "time limit (2 s)"),
    ),
    "other programs": ("import subprocess\nsubprocess.run(['/bin/sh', '-c', 'echo'])", "PermissionError"),
    "memory hog": ("held = []\nwhile True:\n    held.append(bytearray(10**7))", "memory limit (256 MB)"),
    "endless loop": ("while True: pass", "time limit (2 s)"),
    "sleep": ("import time\ntime.sleep(1000)", "time limit (2 s)"),
    "endless output": ("while True: print('x' * 1000)", "File too large"),
    "recursion": ("def f(): return f()\nf()", "RecursionError"),
    "crash": ("import ctypes\nctypes.string_at(0)", "died of SIGSEGV"),
    "internet socket": ("import socket\nsocket.create_connection(('127.0.0.1', PORT))", "PermissionError"),
    "local socket": ("import socket\nsocket.socketpair()", "PermissionError"),
    "killing the parent": ("import os\nos.kill(os.getppid(), 9)", "PermissionError"),
    "killing everything": ("import os\nos.kill(-1, 9)", "PermissionError"),
    "raising its own limits": (
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
        "not allowed to raise maximum limit",
    ),
    "limits of others": (
        "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
        "Permission",
    ),
    "new namespaces": (
        "import os\nos.unshare(0x10000000)" if hasattr(os, "unshare") else "raise PermissionError",
        "Perm",
    ),
}


@pytest.mark.parametrize(("source", "reason"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_programs_end_within_their_limits(source, reason, protected) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        value, given, seconds = score(source.replace("PORT", str(server.getsockname()[1])))
        with pytest.raises(TimeoutError):
            server.accept()
    assert value == 0.0
    assert any(text in given for text in ((reason,) if isinstance(reason, str) else reason)), given
    assert seconds < LIMITS.seconds + SLACK


@pytest.mark.parametrize(
    "how", ["open(PATH, 'w').write('x')", "import os\nos.mkdir(PATH)", "import os\nos.symlink('/', PATH)"]
)
def test_nothing_is_written_outside_its_folder(how, protected, tmp_path) -> None:
    target = tmp_path / "evil"
    value, reason, _ = score(how.replace("PATH", repr(str(target))))
    assert value == 0.0
    assert "Error" in reason
    assert not target.exists()


def test_files_of_others_stay_as_they_are(protected, tmp_path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for how in ("os.remove(P)", "os.rename(P, P + '2')", "os.chmod(P, 0)", "os.truncate(P, 0)", "open(P, 'r+')"):
        value, reason, _ = score(f"import os\nP = {str(victim)!r}\n{how}")
        assert value == 0.0, how
        assert "Error" in reason, how
    assert victim.read_text() == "precious"
    assert victim.stat().st_mode & 0o777


def test_a_file_system_of_its_own_hides_the_machine_and_is_small(tmp_path) -> None:
    if not sandbox.protection()[0]:
        pytest.skip("this kernel refuses namespaces")
    secret = tmp_path / "secret"
    secret.write_text("key")
    assert "FileNotFoundError" in score(f"print(open({str(secret)!r}).read())")[1]
    assert "FileNotFoundError" in score("print(open('/etc/passwd').read())")[1]
    assert score("open('a', 'w').write('done')\nprint(open('a').read())")[0] == 1.0
    fill = "for i in range(99):\n    with open(str(i), 'wb') as file:\n        file.write(bytes(10**6))"
    assert "No space left" in score(fill)[1]


def test_no_process_survives(protected, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # so that it stands in the command lines of this test's
    score("import os, time\ntry:\n    os.setsid()\nexcept OSError:\n    pass\ntime.sleep(100)")
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            assert str(tmp_path).encode() not in (folder / "cmdline").read_bytes()
    assert not list(tmp_path.iterdir())


def test_system_calls_by_number_are_refused_as_well(protected) -> None:
    numbers = [
        n for n in (confine._FORBIDDEN[c][0 if platform.machine() == "x86_64" else 1] for c in confine._FORBIDDEN) if n
    ]
    source = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nfor number in " + repr(numbers)
    source += (
        ":\n    assert libc.syscall(number, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() == 1, number\nprint('done')"
    )
    assert score(source)[:2] == (1.0, "1 of 1 tests passed")


ADD = "def add(a, b):\n    return a + b"
CALLS = [{"call": "add(3, 4)", "returns": 7}, {"call": "add([1], [2.0])", "returns": [1, 2]}]


def test_three_kinds_of_test() -> None:
    source = ADD + "\nif __name__ == '__main__':\n    print(add(*map(int, input().split())))"
    tests = [
        *CALLS,
        "assert add('a', 'b') == 'ab'",
        {"check": "assert add(1, 1) == 2"},
        {"stdin": "3 4\n", "stdout": "7"},
    ]
    assert score(source, *tests)[:2] == (1.0, "5 of 5 tests passed")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def add(a, b):\n    return 7", "add([1], [2.0]): returned 7"),
        ("def add(a, b):\n    raise TypeError('no')", "add(3, 4): TypeError: no"),
        ("import os\nos._exit(0)", "it ended before all tests"),
        ("import sys\ndef add(a, b):\n    sys.exit(0)", "it ended before all tests"),
        ("class All:\n    def __eq__(self, other): return True\ndef add(a, b): return All()", "returned <program.All"),
        ("def add(a, b): return True", "returned True"),  # True is no 1
        ("def add(a, b", "SyntaxError"),
        ("import os\nos.write(3, b'{\"call\": 0}\\nnonsense\\n' * 9)\nos._exit(0)", "it ended before all tests"),
    ],
)
def test_wrong_programs_and_tricks_score_nothing(source, reason) -> None:
    value, given, _ = score(source, *CALLS, "assert add(1, 1) == 2")
    assert value == 0.0
    assert reason in given


def test_partial_credit_is_the_share_of_tests() -> None:
    tests = [*CALLS, {"stdin": "", "stdout": "never"}, "assert add(1, 2) == 3"]
    assert score(ADD, *tests, partial=True)[0] == 0.75
    assert score(ADD, *tests)[0] == 0.0


def test_output_is_compared_line_by_line_without_trailing_blanks() -> None:
    assert score("print('a  \\nb\\n\\n')", {"stdin": "", "stdout": "a\nb"})[0] == 1.0
    assert score("print(' a')", {"stdin": "", "stdout": "a"})[0] == 0.0


def test_the_program_is_the_last_python_block() -> None:
    assert program_of("```python\na\n```\ntext\n```\nb\n```\n```bash\nc\n```", fenced=True) == "b\n"
    assert program_of("print(1)", fenced=True) is None
    assert program_of("print(1)", fenced=False) == "print(1)"


@pytest.mark.parametrize("tests", [[], None, "assert 1", [{"stdin": ""}], [7]], ids=str)
def test_bad_tests_are_named(tests) -> None:
    with pytest.raises(ValueError, match=r"problem\.info\['tests'\]"):
        CodeTests(limits=LIMITS)("```\nx\n```", Problem(prompt="q", info={"tests": tests}))


def test_a_machine_that_cannot_confine_refuses_unless_told(monkeypatch) -> None:
    sandbox.protection.cache_clear()
    monkeypatch.setattr(sandbox.confine, "__file__", str(Path(__file__).with_name("no_seccomp.py")))
    with pytest.raises(ValueError, match=r"cannot be confined on this machine \(.*no seccomp.*unconfined=true"):
        CodeTests()
    assert score("print('done')", unconfined=True)[0] == 1.0
    sandbox.protection.cache_clear()


@pytest.mark.parametrize("arguments", [{"seconds": 0}, {"memory_mb": 1}, {"file_mb": 0}], ids=str)
def test_limits_out_of_range(arguments) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        Limits(**arguments)
    with pytest.raises(ValueError, match="max_programs=0"):
        CodeTests(max_programs=0)


def test_the_filter_is_the_same_length_on_both_architectures_and_knows_no_other(monkeypatch) -> None:
    assert len(confine._bpf(0xC00000B7, 1, True)) % 8 == 0
    monkeypatch.setattr(confine.platform, "machine", lambda: "riscv64")
    with pytest.raises(OSError, match="riscv64 are not known"):
        confine._filter_system_calls(may_write=True)
    assert sys.platform == "linux"
