# SPDX-License-Identifier: Apache-2.0
"""Entry point: ``python -m hami_webhook --config FILE``.

With ``--render-configuration`` it prints the MutatingWebhookConfiguration instead; see ``--help``.
"""

import sys

from hami_webhook.app import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
