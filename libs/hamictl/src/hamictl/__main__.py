# SPDX-License-Identifier: Apache-2.0
"""Entry point: ``python -m hamictl``; installed as ``hamictl`` and as ``kubectl-hami``."""

from hamictl.cli import main

if __name__ == "__main__":
    main()
