# SPDX-License-Identifier: Apache-2.0
"""An installation lives through restarts, rotations, updates and a reboot while pods come and go.

During each change up to five pods a second are created and deleted. No pod is lost, none waits
longer than ``PENDING_MOST_S``, and at every sampled instant ledger, annotation, kubelet and
container agree on each running pod (``truth``).
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import anyio
import pytest
from nats.errors import Error as NatsError

from hami_common import namespaces
from hami_common.errors import Unavailable
from tests.install.churn import Churn, run_churn
from tests.install.installation import Installation
from tests.install.tenant import NAMESPACE, Tenant, share

pytestmark = [
    pytest.mark.long,
    pytest.mark.anyio,
    pytest.mark.shares_cluster,
    # nats-py leaves the streams of attempts to reconnect open.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.timeout(400),
]

RATE_PER_S = 5.0
LIFETIME_S = 3.0
MOST_PODS = 40
"""Number of pods at five a second, where each exists for eight seconds."""
PENDING_MOST_S = 30.0
BEFORE_S = 3.0
"""Pods come and go for so long before and after a change."""
SAMPLE_S = 1.0
END_S = 60.0
ROLLOUT_S = 120.0
STATUS_S = 15.0
"""Kubelet writes the devices of its node every 10 s, and admits pods by what it wrote last."""
REFRESH_S = 150.0
"""Kubelet refreshes files of ConfigMaps within 60 to 90 s; the agent reads them every 10 s."""
WORKLOADS = {
    "webhook": (namespaces.SYSTEM, "deployment/hami-webhook"),
    "scheduler": (namespaces.SYSTEM, "deployment/hami-scheduler"),
    "registry": (namespaces.SYSTEM, "deployment/hami-registry"),
    "nats": (namespaces.SYSTEM, "statefulset/hami-nats"),
    "nodeagent": (namespaces.AGENTS, "daemonset/hami-nodeagent-nvidia"),
}

Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
async def dev(installation: Installation) -> Installation:
    """The overlay dev, Ready."""
    await installation.ensure("dev")
    return installation


@asynccontextmanager
async def life_goes_on(dev: Installation, record: Record) -> AsyncIterator[None]:
    """Pods come and go while the block runs; then the test fails on each fault that was seen."""
    seen: list[str] = []
    async with (
        dev.truth(NAMESPACE) as truth,
        anyio.create_task_group() as group,
        run_churn(
            dev.client, rate_per_s=RATE_PER_S, lifetime_s=LIFETIME_S, most=MOST_PODS
        ) as churn,
    ):

        async def sample() -> None:
            while True:
                # While the bus restarts there is nothing to be sampled.
                with suppress(NatsError, TimeoutError, OSError):
                    seen.extend(await truth.problems())
                await anyio.sleep(SAMPLE_S)

        group.start_soon(sample)
        await anyio.sleep(BEFORE_S)
        yield
        await anyio.sleep(BEFORE_S)
        await churn.end(limit_s=END_S)
        group.cancel_scope.cancel()
    _report(churn, truth.samples, record)
    faults = [*churn.faults(pending_most_s=PENDING_MOST_S), *sorted(set(seen))]
    assert faults == [], "\n".join([*faults, await dev.story()])
    assert truth.samples > 0


def _report(churn: Churn, samples: int, record: Record) -> None:
    waits = churn.pending_s()
    record("pods", len(waits))
    record("pods a second", f"{churn.rate_per_s():.1f}")
    record("judged", samples)
    record("pending p50, p99, longest", _quantiles(waits))


def _quantiles(sorted_s: list[float]) -> str:
    places = (len(sorted_s) // 2, len(sorted_s) * 99 // 100, -1)
    return ", ".join(f"{sorted_s[place]:.1f} s" for place in places)


async def _restart(dev: Installation, namespace: str, name: str) -> None:
    await dev.site.kubectl("--namespace", namespace, "rollout", "restart", name)
    await dev.site.kubectl(
        *("--namespace", namespace, "rollout", "status", name, f"--timeout={ROLLOUT_S:g}s")
    )


@pytest.mark.parametrize("workload", list(WORKLOADS))
async def test_rolling_restart_loses_doubles_and_uncaps_no_pod(
    dev: Installation, record_property: Record, workload: str
) -> None:
    namespace, name = WORKLOADS[workload]
    async with life_goes_on(dev, record_property):
        await _restart(dev, namespace, name)
    await dev.ready()


async def test_rotated_signing_key_loses_no_pod(dev: Installation, record_property: Record) -> None:
    async with life_goes_on(dev, record_property):
        done = await dev.hamictl("rotate-key", "--refresh", f"{REFRESH_S:g}")
        assert done.returncode == 0, done.stdout + done.stderr
    retired = await dev.hamictl("rotate-key", "--retire")
    assert retired.returncode == 0, retired.stdout + retired.stderr
    assert "none" not in retired.stdout
    keys = await dev.client.get("configmaps", "hami-trusted-keys", namespaces.AGENTS)
    assert len(keys["data"]) == 1


async def test_renewed_certificates_lose_no_pod(dev: Installation, record_property: Record) -> None:
    """All of them at once, with their authority, which happens once in ten years."""
    before = await dev.client.get("configmaps", "hami-ca", namespaces.SYSTEM)
    async with life_goes_on(dev, record_property):
        done = await dev.hamictl("bootstrap", "--valid-days", "4000", "--renew-days", "3700")
        assert done.returncode == 0, done.stdout + done.stderr
        await anyio.sleep(REFRESH_S)
        for workload in ("nats", "registry"):
            await _restart(dev, *WORKLOADS[workload])
    after = await dev.client.get("configmaps", "hami-ca", namespaces.SYSTEM)
    assert before["data"]["ca.crt"] in after["data"]["ca.crt"] != before["data"]["ca.crt"]
    await dev.ready()


@pytest.mark.timeout(900)  # the images of the earlier state are built
async def test_downgrade_and_update_lose_no_pod(
    dev: Installation, tenant: Tenant, record_property: Record
) -> None:
    await tenant.create(share("stays", memory_mib=2000))
    await tenant.running("stays")
    try:
        for place in (await dev.previous(), dev.place):
            async with life_goes_on(dev, record_property):
                await dev.update(place)
            await dev.ready()
            assert (await tenant.memory("stays"))[0] == 2000
    finally:
        await dev.update(dev.place)  # for the tests that follow


async def _keeps_a_running_share(
    dev: Installation, tenant: Tenant, change: Callable[[], Awaitable[None]]
) -> None:
    """A pod that runs before a change is capped and known after it."""
    await tenant.create(share("stays", memory_mib=2000, core_pct=20))
    await tenant.running("stays")
    await change()
    await dev.ready()

    async def is_limited() -> bool:
        # Kubelet opens no session before it has read its pods again.
        with suppress(Unavailable):
            return (await tenant.memory("stays"))[0] == 2000
        return False

    try:
        await dev.site.until("the pod is limited", is_limited, limit_s=120)
    except TimeoutError as error:
        raise AssertionError(await dev.story()) from error
    await tenant.create(share("comes", memory_mib=2000, core_pct=20))
    await tenant.running("comes")
    async with dev.truth(NAMESPACE) as truth:

        async def agrees() -> bool:
            return not await truth.problems()

        await dev.site.until("all parts agree", agrees, limit_s=90)


async def test_restarted_kubelet_keeps_shares(dev: Installation, tenant: Tenant) -> None:
    await _keeps_a_running_share(dev, tenant, dev.site.node.restart_kubelet)


async def test_restarted_containerd_keeps_shares(dev: Installation, tenant: Tenant) -> None:
    await _keeps_a_running_share(dev, tenant, dev.site.node.restart_containerd)


async def test_rebooted_node_serves_pods_of_controllers_again(
    dev: Installation, tenant: Tenant
) -> None:
    """A pod without a controller is lost: kubelet admits it before any device plugin is there."""
    pod = share("web", memory_mib=2000, labels={"app": "web"})
    await tenant.create_deployment("web", pod)
    await dev.site.reboot()
    await dev.ready()

    async def is_limited() -> bool:
        with suppress(Unavailable):
            return (await tenant.memory("deployment/web"))[0] == 2000
        return False

    try:
        await dev.site.until("a pod of the Deployment is limited", is_limited, limit_s=150)
    except TimeoutError as error:
        raise AssertionError(await dev.story()) from error
    await anyio.sleep(STATUS_S)
