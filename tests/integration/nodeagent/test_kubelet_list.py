# SPDX-License-Identifier: Apache-2.0
"""Reading pods from kubelet: within its rate limit, and through the fallback when needed."""

from pathlib import Path
from typing import Any

import anyio
import pytest

from hami_common.errors import Unavailable
from hami_nodeagent.core.claims import ListedPod
from hami_nodeagent.shell.podresources import PodResources, PodsPage
from tests.integration.nodeagent.plane import RESOURCE, Ask, Plane
from tests.unit.nodeagent.shell.support import make_site

pytestmark = pytest.mark.anyio


async def test_calls_beyond_kubelets_rate_are_made_again(plane: Plane, tmp_path: Path) -> None:
    socket = str(plane.kubelet.pod_resources_socket)
    site = make_site(tmp_path, pod_resources_socket=socket, list_timeout_s=20.0)
    lister = PodResources(site=site)
    answers: list[tuple[ListedPod, ...]] = []

    async def ask() -> None:
        answers.append(await lister.list())

    async with anyio.create_task_group() as group:
        for _ in range(40):
            group.start_soon(ask)
    assert answers == [()] * 40
    await lister.aclose()


async def test_silence_is_unavailable_within_the_deadline(tmp_path: Path) -> None:
    site = make_site(tmp_path, list_timeout_s=0.3)
    lister = PodResources(site=site)
    with anyio.fail_after(10), pytest.raises(Unavailable):
        await lister.list()
    with pytest.raises(Unavailable):
        await lister.serves_get(timeout_s=0.1)
    assert await lister.healthy_ids(RESOURCE, timeout_s=0.1) is None
    await lister.aclose()


async def test_kubelet_that_looks_a_missing_pod_up_serves_get(plane: Plane, tmp_path: Path) -> None:
    socket = str(plane.kubelet.pod_resources_socket)
    lister = PodResources(site=make_site(tmp_path, pod_resources_socket=socket))
    assert await lister.serves_get(timeout_s=20.0)
    await lister.aclose()


async def test_pods_that_are_listed_for_long_are_settled_until_kubelet_restarts(
    plane: Plane, tmp_path: Path
) -> None:
    socket = str(plane.kubelet.pod_resources_socket)
    site = make_site(tmp_path, pod_resources_socket=socket, settle_s=0.2)
    lister = PodResources(site=site)
    await plane.create("plain", Ask(command="exec sleep 1000"))
    await plane.bind_plainly("plain", {})
    await plane.until_phase("plain", "Running")
    assert [pod.settled for pod in await lister.list()] == [False]
    await anyio.sleep(0.25)
    assert [pod.settled for pod in await lister.list()] == [True]
    lister.forget_settled()
    assert [pod.settled for pod in await lister.list()] == [False]
    await lister.aclose()


async def test_without_podresources_kubelets_pods_page_serves(plane: Plane) -> None:
    (plane.directory / "token").write_text(f"{plane.api.token}\n")
    more: dict[str, Any] = {
        "pod_resources_socket": str(plane.directory / "none.sock"),
        "list_timeout_s": 0.3,
        "kubelet_pods_url": f"{plane.kubelet.url}/pods",
        "kubelet_pods_token_file": str(plane.directory / "token"),
    }
    async with plane.agent(**more):
        for number in range(3):
            name = f"web-{number}"
            await plane.place(
                name,
                Ask(name="fetch", kind="init", shares=((number, 100),), command="true"),
                Ask(shares=((number, 200),)),
            )
            await plane.until_phase(name, "Running")
            seen = await plane.environment(name)
            assert seen["NVIDIA_VISIBLE_DEVICES"] == plane.devices[number].uuid
            assert seen["CUDA_DEVICE_MEMORY_LIMIT_0"] == "200m"


async def test_pods_page_that_does_not_answer_is_unavailable(tmp_path: Path) -> None:
    page = PodsPage("http://127.0.0.1:9/pods", token_file=str(tmp_path / "missing"))
    with pytest.raises(Unavailable):
        await page.read(0.2)
    page = PodsPage("http://127.0.0.1:9/pods")
    with pytest.raises(Unavailable):
        await page.read(0.2)
