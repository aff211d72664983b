# SPDX-License-Identifier: Apache-2.0
"""Names the namespaces of an installation, as ``deploy/kustomize`` creates them.

The services run in one that enforces the Pod Security level ``restricted``. The agents, which need
host paths, the host's process ids and root, run in a namespace of their own.
"""

from typing import Final

SYSTEM: Final = "hami-system"
AGENTS: Final = "hami-agents"
