# SPDX-License-Identifier: Apache-2.0
"""Names the namespaces of an installation, as ``deploy/kustomize`` makes them.

The services run in one that enforces the Pod Security level ``restricted``. The agents, which need
host paths, the host's process ids and root, run in one of their own.
"""

from typing import Final

SYSTEM: Final = "hami-system"
AGENTS: Final = "hami-agents"
