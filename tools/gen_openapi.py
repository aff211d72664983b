# SPDX-License-Identifier: Apache-2.0
"""Generates the documents of docs/openapi from the services' tables of operations."""

import sys

from hami_registry.shell import openapi as registry
from hami_scheduler.shell import openapi as scheduler
from tools.generated import DOCS, write


def main() -> int:
    """Write, or with ``--check`` compare; the exit code."""
    documents = {"registry": registry.encoded(), "scheduler": scheduler.encoded()}
    return write({DOCS / f"openapi/{name}.json": one.decode() for name, one in documents.items()})


if __name__ == "__main__":
    sys.exit(main())
