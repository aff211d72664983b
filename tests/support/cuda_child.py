# SPDX-License-Identifier: Apache-2.0
"""Children of tests that load the fake driver at run time, with the limiter preloaded."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LIMIT_MIB = 256
_PATIENCE_S = 50


class CudaChild:
    """Runs Python statements in a child process; cuda_guest.py is imported there already."""

    def __init__(self, state: Path, limiter: Path, drivers: Path, region: Path) -> None:
        """``region`` is the directory of the processes' shared accounts, ``state`` the machine."""
        self.environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(HERE),
            "LD_PRELOAD": str(limiter),
            "LD_LIBRARY_PATH": str(drivers),
            "FAKE_NVML_STATE": str(state),
            "CUDA_DEVICE_MEMORY_LIMIT": f"{LIMIT_MIB}m",
            "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(region),
        }

    def __call__(self, body: str, **environment: str) -> Any:
        """Return the content of ``told`` after the statements; they must succeed and print no
        error.
        """
        program = (
            "import json\nfrom cuda_guest import *\ntold = None\n"
            + textwrap.dedent(body)
            + "\nprint(json.dumps(told))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=_PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return json.loads(done.stdout)
