# SPDX-License-Identifier: Apache-2.0
"""Generates docs/openapi/registry.json from the registry's table of operations.

python tools/gen_openapi.py            write the file
python tools/gen_openapi.py --check    exit 1 when it differs
"""

import argparse
import sys
from pathlib import Path

from hami_registry.shell import openapi

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs/openapi/registry.json"


def main() -> int:
    """Write or compare; the exit code is 1 when a check finds drift."""
    parser = argparse.ArgumentParser(description="Generate docs/openapi/registry.json.")
    parser.add_argument("--check", action="store_true", help="compare only; write nothing")
    check_only: bool = parser.parse_args().check
    fresh = openapi.encoded()
    old = TARGET.read_bytes() if TARGET.exists() else b""
    if check_only:
        if fresh != old:
            sys.stderr.write(f"{TARGET.relative_to(ROOT)}: differs; run tools/gen_openapi.py\n")
        return int(fresh != old)
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_bytes(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
