"""`srun` and `scontrol` of a cluster of one node with two tasks: runs a command twice, notes a wish for a requeue."""

import os
import signal
import subprocess
import sys
from pathlib import Path


def srun() -> int:
    command = [word for word in sys.argv[1:] if not word.startswith("--kill-on")]
    ranks = []
    for rank in range(2):
        task = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"}
        ranks.append(subprocess.Popen(command, env=os.environ | task))
    signal.signal(signal.SIGTERM, lambda number, frame: [rank.send_signal(number) for rank in ranks])
    Path("srun.pid").write_text(str(os.getpid()))
    return max(rank.wait() for rank in ranks)


if Path(sys.argv[0]).name == "scontrol":
    Path("requeued").write_text(" ".join(sys.argv[1:]))
else:
    sys.exit(srun())
