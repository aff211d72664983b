# SPDX-License-Identifier: Apache-2.0
"""The page's commands remove an installation and leave what the page names, and nothing else.

A pod with a share runs meanwhile and stays limited until it ends.
"""

import pytest

from tests.cluster.site.manifests import VOLUMES
from tests.install import footprint
from tests.install.installation import Installation
from tests.install.tenant import Tenant, share

pytestmark = [
    pytest.mark.long,
    pytest.mark.anyio,
    pytest.mark.shares_cluster,
    pytest.mark.timeout(900),
]

LEFT = (f"file {VOLUMES}/local-", "object v1 PersistentVolume local-")
"""The volumes of NATS, whose reclaim policy is Retain."""
OF_KUBELET = ("file /var/lib/kubelet/", "file /var/lib/cni/", "file /run/")
"""Directories of kubelet and of the container runtime, where every pod changes files."""
OURS = ("hami", "vgpu", "nvidia")


async def test_page_leaves_what_it_names_and_limits_pods_until_they_end(
    installation: Installation, tenant: Tenant
) -> None:
    await installation.ensure("dev")
    await tenant.create(share("stays", memory_mib=2000, core_pct=25))
    await tenant.running("stays")
    assert (await tenant.memory("stays"))[0] == 2000, await tenant.view("stays")

    refused = await installation.hamictl("uninstall")
    assert refused.returncode == 1, refused.stdout
    assert "stays" in refused.stdout + refused.stderr

    kept = await installation.hamictl("uninstall", "--keep-pods", "--wait", "0")
    assert "node-1" in kept.stdout + kept.stderr
    assert (await tenant.memory("stays"))[0] == 2000, await tenant.view("stays")
    assert await tenant.compute_pct("stays", for_s=2) <= 30

    await tenant.delete_all()
    for done in await installation.uninstall():
        assert done.returncode == 0, f"{done.args}: {done.stdout}{done.stderr}"
    assert installation.before is not None
    after = await footprint.take(installation.site)
    changes = footprint.differences(installation.before, after)
    unnamed = [line for line in changes if not line.startswith(LEFT) and not _is_kubelets(line)]
    assert unnamed == [], "\n".join(unnamed)


def _is_kubelets(change: str) -> bool:
    return change.startswith(OF_KUBELET) and not any(word in change for word in OURS)
