"""Runs one untrusted Python program inside this process, after giving up the means to do harm. Standard library only.

It is executed as a script by `sandbox.py`, one process per program:

    limits       address space, CPU time, size of any file, open files, no core dumps
    namespaces   a user namespace with an empty network and a file system of its own: a small tmpfs as working
                 directory, the system's libraries and Python read-only, and nothing else of this machine
    seccomp      no sockets, no new processes (threads are fine), no signals, no tracing, mounting or kernel keys

Where the kernel refuses namespaces (most containers), seccomp also refuses every way to change a file, so a program can
read what its user can, but writes nothing at all. Without seccomp nothing is run. What was left out: hiding the files
in that second case, and limits on how much is read.

Calls of libc go through ctypes, since Python has no `mount` or `prctl`. Numbers of system calls are x86_64's and
aarch64's.
"""

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

REFUSED = 97  # exit code: the confinement asked for could not be had, and nothing was run

_LIBC = ctypes.CDLL(None, use_errno=True)
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # AUDIT_ARCH, column below
# system call: (x86_64, aarch64); None where the architecture has none of that name
_Calls = dict[str, tuple[int | None, int | None]]
_FORBIDDEN: _Calls = {
    "socket": (41, 198), "socketpair": (53, 199), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438), "setsid": (112, 157), "setpgid": (109, 154),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "fanotify_init": (300, 262),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180),
}  # fmt: skip
_CHANGES_FILES: _Calls = {
    "creat": (85, None), "truncate": (76, 45), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276),
    "unlink": (87, None), "unlinkat": (263, 35), "rmdir": (84, None), "mkdir": (83, None), "mkdirat": (258, 34),
    "mknod": (133, None), "mknodat": (259, 33), "link": (86, None), "linkat": (265, 37), "symlink": (88, None),
    "symlinkat": (266, 36), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54), "utime": (132, None),
    "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5),
    "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
}  # fmt: skip
_CLONE, _CLONE3, _PRLIMIT, _OPEN, _OPENAT, _OPENAT2 = (
    (56, 220),
    (435, 435),
    (302, 261),
    (2, None),
    (257, 56),
    (437, 437),
)
_SHARED = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/localtime")
_WORK = ".program"  # the working directory, a name that no path of `_SHARED` begins with
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_NEW_USER, _NEW_MOUNTS, _NEW_IPC, _NEW_NETWORK = 0x10000000, 0x00020000, 0x08000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18


def confine(limits: dict[str, int], folder: str, namespaces: bool | None) -> bool:
    """Give up what the program must not have.

    Args:
        limits: `memory_mb`, `cpu_seconds`, `file_mb`.
        folder: a host folder that nobody else uses, the mount point of the new root.
        namespaces: True insists on them, False does without, None takes them where they can be had.

    Returns:
        Whether the program has a file system of its own; else it can write no file.

    Raises:
        OSError: namespaces that were insisted on, or seccomp, cannot be had.
    """
    own_files = False
    if namespaces is not False:
        try:
            _enter_namespaces(folder, limits["file_mb"])
            own_files = True
        except OSError:
            if namespaces:
                raise
    set_limits(limits)
    _drop_capabilities()
    _filter_system_calls(may_write=own_files)
    return own_files


def set_limits(limits: dict[str, int]) -> None:
    """Resource limits of this process; there will be no other."""
    mebi = 1 << 20
    for kind, value in (
        (resource.RLIMIT_AS, limits["memory_mb"] * mebi),
        (resource.RLIMIT_FSIZE, limits["file_mb"] * mebi),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
    ):
        resource.setrlimit(kind, (value, value))


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: Any, target: Any, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if text is None else str(text).encode() for text in (source, target, kind, options)]
    _checked(_LIBC.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]), f"mount {target}")


def _enter_namespaces(folder: str, file_mb: int) -> None:
    user, group = os.geteuid(), os.getegid()
    _checked(_LIBC.unshare(_NEW_USER | _NEW_MOUNTS | _NEW_IPC | _NEW_NETWORK), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    root = Path(folder)
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID, "size=1m,mode=755")
    for path in dict.fromkeys((*_SHARED, *_DEVICES, sys.base_prefix, sys.prefix)):
        _show(Path(path), root)
    (root / _WORK).mkdir()
    _mount("tmpfs", root / _WORK, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={file_mb}m,nr_inodes=1000")
    _mount(None, root, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID)
    os.chdir(root)
    number = (155, 41)[_ARCHITECTURES[platform.machine()][1]]
    _checked(_LIBC.syscall(number, b".", b"."), "pivot_root")
    _checked(_LIBC.umount2(b".", 2), "umount2")  # MNT_DETACH: the old root, which now lies on top
    os.chdir(f"/{_WORK}")


def _show(path: Path, root: Path) -> None:
    """Make a path of this machine readable below the new root, at the same place."""
    target = root / path.relative_to("/")
    if not path.exists() or target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        target.symlink_to(os.readlink(path))
        return
    if path.is_dir():
        target.mkdir()
    else:
        target.touch()
    _mount(path, target, None, _MS_BIND | _MS_REC)
    attributes = struct.pack("QQQQ", _MS_RDONLY | _MS_NOSUID, 0, 0, 0)
    recursive, here = 0x8000, -100
    result = _LIBC.syscall(442, here, bytes(target), recursive, attributes, ctypes.c_size_t(len(attributes)))
    _checked(result, f"mount_setattr {target}")


def _drop_capabilities() -> None:
    header, nothing = struct.pack("Ii", 0x20080522, 0), bytes(24)
    number = (126, 91)[_ARCHITECTURES[platform.machine()][1]]
    _checked(_LIBC.syscall(number, header, nothing), "capset")


def _filter_system_calls(may_write: bool) -> None:
    if platform.machine() not in _ARCHITECTURES:
        raise OSError(f"system calls of {platform.machine()} are not known here")
    program = _bpf(*_ARCHITECTURES[platform.machine()], may_write)
    code = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    _checked(_LIBC.prctl(38, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    _checked(_LIBC.prctl(22, 2, described, 0, 0), "PR_SET_SECCOMP")


def _bpf(architecture: int, column: int, may_write: bool) -> bytes:
    """The filter as bytes of `struct sock_filter`. It fails calls with EPERM, and kills other architectures' ones."""
    load, equal, at_least, any_bit, ret = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, deny, unknown, kill = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38, 0x80000000
    number_at, architecture_at, argument_at = 0, 4, (16, 24, 32)
    code = [(load, 0, 0, architecture_at), (equal, 1, 0, architecture), (ret, 0, 0, kill), (load, 0, 0, number_at)]
    code += [(at_least, 0, 1, 0x40000000), (ret, 0, 0, kill)]  # x32 calls, and no others have such numbers

    def when(call: tuple[int | None, int | None], *then: tuple[int, int, int, int]) -> None:
        number = call[column]
        if number is not None:
            code.extend([(equal, 0, len(then), number), *then])

    for call in [*_FORBIDDEN.values(), *(() if may_write else _CHANGES_FILES.values())]:
        when(call, (ret, 0, 0, deny))
    when(_CLONE3, (ret, 0, 0, unknown))  # its flags cannot be read here; libc then takes clone
    thread = 0x00010000
    when(_CLONE, (load, 0, 0, argument_at[0]), (any_bit, 1, 0, thread), (ret, 0, 0, deny), (ret, 0, 0, allow))
    when(_PRLIMIT, (load, 0, 0, argument_at[0]), (equal, 1, 0, 0), (ret, 0, 0, deny), (ret, 0, 0, allow))
    if not may_write:
        writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
        for call, argument in ((_OPEN, 1), (_OPENAT, 2)):
            test = (any_bit, 0, 1, writing)
            when(call, (load, 0, 0, argument_at[argument]), test, (ret, 0, 0, deny), (ret, 0, 0, allow))
        when(_OPENAT2, (ret, 0, 0, unknown))
    code.append((ret, 0, 0, allow))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def _run(job: dict[str, Any], report: Callable[[dict[str, Any]], None]) -> None:
    """The program, then what it is asked: results go to `report` as one JSON line each."""
    space: dict[str, Any] = {"__name__": "program" if job["calls"] or job["checks"] else "__main__"}
    exec(compile(job["source"], "program.py", "exec"), space)
    for index, expression in enumerate(job["calls"]):
        try:
            result = {"value": repr(eval(expression, space))}
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        report({"call": index} | result)
    for index, check in enumerate(job["checks"]):
        try:
            exec(compile(check, f"check {index}", "exec"), space)
            result = {"token": job["token"]}
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        report({"check": index} | result)


def main() -> None:
    """`confine.py JOB FOLDER`: run the job, a JSON file that is removed before anything of it is run."""
    _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    path, folder = sys.argv[1:]
    job = json.loads(Path(path).read_text())
    results = os.open(job["results"], os.O_WRONLY | os.O_APPEND)
    os.remove(path)

    def report(result: dict[str, Any]) -> None:
        os.write(results, json.dumps(result).encode() + b"\n")

    try:
        if job["confined"]:
            report({"own_files": confine(job["limits"], folder, job["namespaces"])})
        else:
            set_limits(job["limits"])
            report({"own_files": False})
    except OSError as error:
        report({"refused": str(error)})
        os._exit(REFUSED)
    _run(job, report)


if __name__ == "__main__":
    main()
