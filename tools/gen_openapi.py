# SPDX-License-Identifier: Apache-2.0
"""Generates the documents of docs/openapi from the services' tables of operations.

python tools/gen_openapi.py            write the files
python tools/gen_openapi.py --check    exit 1 when one differs
"""

import argparse
import sys
from pathlib import Path

from hami_registry.shell import openapi as registry
from hami_scheduler.shell import openapi as scheduler

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs/openapi"


def main() -> int:
    """Write or compare; the exit code is 1 when a check finds drift."""
    parser = argparse.ArgumentParser(description="Generate the documents of docs/openapi.")
    parser.add_argument("--check", action="store_true", help="compare only; write nothing")
    check_only: bool = parser.parse_args().check
    code = 0
    for name, fresh in (("registry", registry.encoded()), ("scheduler", scheduler.encoded())):
        target = FOLDER / f"{name}.json"
        if check_only:
            if not target.exists() or target.read_bytes() != fresh:
                sys.stderr.write(f"{target.relative_to(ROOT)}: differs; run tools/gen_openapi.py\n")
                code = 1
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(fresh)
    return code


if __name__ == "__main__":
    sys.exit(main())
