# SPDX-License-Identifier: Apache-2.0
"""Children of tests that load the fake driver at run time, with the limiter preloaded."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_MIB = 256
_PATIENCE_S = 50
_PRELUDE = """
import json
from tests.support.cuda_guest import *
from tests.support.cuda_books import *
told = None
"""


class CudaChild:
    """Runs Python statements in a child process; cuda_guest and cuda_books are imported."""

    def __init__(self, state: Path, limiter: Path, drivers: Path, region: Path) -> None:
        """``region`` is the directory of the processes' shared accounts, ``state`` the machine."""
        self.environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "LD_PRELOAD": str(limiter),
            "LD_LIBRARY_PATH": str(drivers),
            "FAKE_NVML_STATE": str(state),
            "CUDA_DEVICE_MEMORY_LIMIT": f"{LIMIT_MIB}m",
            "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(region),
        }

    def start(self, body: str, **environment: str) -> subprocess.Popen[str]:
        """Start the statements in a child with pipes for its standard input and output."""
        return subprocess.Popen(
            [sys.executable, "-c", _PRELUDE + textwrap.dedent(body)],
            env={**self.environment, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, body: str, **environment: str) -> Any:
        """Return the content of ``told`` after the statements; they must succeed and print no
        error.
        """
        program = _PRELUDE + textwrap.dedent(body) + "\nprint(json.dumps(told))\n"
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
