# SPDX-License-Identifier: Apache-2.0
"""``python -m hami_scheduler --config FILE.toml [--set key=value …] [--check]``."""

import sys

from hami_common.runtime.service import run
from hami_scheduler.app import main
from hami_scheduler.settings import Settings

if __name__ == "__main__":
    sys.exit(run(main, service="scheduler", settings_type=Settings))
