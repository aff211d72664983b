# SPDX-License-Identifier: Apache-2.0
"""Entry point: ``python -m hami_scheduler --config FILE``."""

import sys

from hami_scheduler.app import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
