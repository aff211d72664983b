# SPDX-License-Identifier: Apache-2.0
"""Entry points: ``python -m hami_nodeagent --config FILE``, or another program before the flags.

``plugin-proxy`` and ``agent-devices`` run as separate processes that must stay small: they import
no module of the agent. ``remove`` deletes the agent's files from a node after the agent has ended.
"""

import sys

from hami_common.runtime.footprint import use_one_arena

if __name__ == "__main__":
    use_one_arena()
    if sys.argv[1:2] == ["plugin-proxy"]:
        from hami_nodeagent.shell import pluginproxy

        sys.exit(pluginproxy.main(sys.argv[2:]))
    if sys.argv[1:2] == ["agent-devices"]:
        from hami_nodeagent.shell import agentdevices

        sys.exit(agentdevices.main(sys.argv[2:]))
    if sys.argv[1:2] == ["remove"]:
        from hami_nodeagent.shell import removal

        sys.exit(removal.main(sys.argv[2:]))
    from hami_nodeagent import app

    sys.exit(app.main(sys.argv[1:]))
