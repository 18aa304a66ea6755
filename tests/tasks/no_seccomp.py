"""confine.py on a kernel without seccomp."""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "..", "src", "trace_lightning", "tasks"))
import confine


def refuse(may_write: bool) -> None:
    raise OSError("PR_SET_SECCOMP: no seccomp")


confine._filter_system_calls = refuse
confine.main()
