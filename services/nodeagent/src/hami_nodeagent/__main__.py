# SPDX-License-Identifier: Apache-2.0
"""Entry points: ``python -m hami_nodeagent --config FILE``, or ``plugin-proxy`` before the flags.

The proxy is a process of its own that must stay small: it loads nothing of the agent.
"""

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["plugin-proxy"]:
        from hami_nodeagent.shell import pluginproxy

        sys.exit(pluginproxy.main(sys.argv[2:]))
    from hami_nodeagent import app

    sys.exit(app.main(sys.argv[1:]))
