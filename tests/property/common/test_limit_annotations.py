# SPDX-License-Identifier: Apache-2.0
"""Laws of limits above the request, for any text of the annotations and any device.

A pod is refused with the annotation's name, or each of its limits is at least the request; a share
has limits only above what it books and within its device, and books what it does without them.
"""

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hami_common.errors import RequestInvalid
from hami_common.model.device import Device
from hami_common.model.placement import Placement, Share, booked_by_device
from hami_common.model.request import PodRequest
from hami_common.pods import annotations as keys
from hami_common.pods import limits
from hami_common.pods.podview import PodView
from hami_common.vendors.catalog import Catalog
from hami_core.placement.pick import pick, satisfies
from hami_core.table.table import DeviceTable
from tests.support import builders

CATALOG = Catalog.from_settings()
PHYSICAL_MIB = 16_000
_names = st.sampled_from(("main", "side", "log", "x", ""))


def _texts(most: int) -> st.SearchStrategy[str]:
    """Texts of an annotation, most of them with numbers up to ``most``."""
    numbers = st.integers(0, most).map(str)
    odd = st.sampled_from(("6Gi", "1e3", "0.5", "-3", "²", ""))
    named = st.lists(st.tuples(_names, st.sampled_from("=,"), st.one_of(numbers, odd)))
    return st.one_of(
        numbers,
        st.lists(numbers, min_size=1, max_size=2).map(
            lambda two: ",".join(
                f"{name}={n}" for name, n in zip(("main", "side"), two, strict=False)
            )
        ),
        odd,
        named.map(lambda parts: ",".join("".join(part) for part in parts)),
        st.text(max_size=20),
    )


@st.composite
def documents(draw: st.DrawFn) -> PodView:
    """A pod with two containers that request shares and one that does not."""

    def limits_of(name: str) -> dict[str, str]:
        if name == "log":
            return {"cpu": "1"}
        cores = draw(st.integers(0, 60))
        memory = draw(st.integers(1, PHYSICAL_MIB // 2))
        by = draw(st.sampled_from(("nvidia.com/gpumem", "nvidia.com/gpumem-percentage")))
        amount = memory if by.endswith("mem") else draw(st.integers(1, 50))
        return {by: str(amount), **({"nvidia.com/gpucores": str(cores)} if cores else {})}

    annotations = {
        key: draw(_texts(most))
        for key, most in ((keys.MEMORY_LIMIT, 20_000), (keys.CORES_LIMIT, 100))
        if draw(st.booleans())
    }
    document = {
        "metadata": {"name": "p", "uid": "u", "annotations": annotations},
        "spec": {
            "containers": [
                {"name": name, "resources": {"limits": limits_of(name)}}
                for name in ("main", "side", "log")
            ]
        },
    }
    return msgspec.convert(document, PodView)


_devices = st.builds(
    builders.device,
    st.just("x"),
    memory_mib=st.just(PHYSICAL_MIB),
    capacity_mib=st.sampled_from((PHYSICAL_MIB, PHYSICAL_MIB - 500, 2 * PHYSICAL_MIB)),
    largest_mib=st.sampled_from((0, 0, PHYSICAL_MIB)),
    core_pct=st.just(200),
)


@given(pod=documents(), device=_devices)
def test_limits_are_refused_by_name_or_within_request_and_device(
    pod: PodView, device: Device
) -> None:
    request = _parsed(pod)
    if isinstance(request, RequestInvalid):
        assert request.field in {f"annotation {key}" for key in pod.annotations()}
        assert request.fix
        return
    for asking in request.containers:
        (asked,) = asking.requests
        assert not asked.memory_limit_mib or asked.memory_limit_mib >= asked.memory_mib
        assert not asked.core_limit_pct or 100 >= asked.core_limit_pct >= asked.core_pct > 0

    table = DeviceTable()
    table.upsert_node(builders.node_devices("n", [device]))
    found, plain = pick(table, request, "n"), pick(table, _without(request), "n")
    assert isinstance(found, Placement) == isinstance(plain, Placement)
    if not (isinstance(found, Placement) and isinstance(plain, Placement)):
        return
    assert booked_by_device(found.containers) == booked_by_device(plain.containers)
    assert satisfies(table, request, "n", found.containers)
    assert satisfies(table, request, "n", plain.containers)
    for container in found.containers:
        for share in container.shares:
            _check(share, device)
        wanted = limits.limits_of(container, allocation_id="a")
        assert limits.decode(limits.encode(wanted)) == wanted


def _parsed(pod: PodView) -> PodRequest | RequestInvalid:
    try:
        request = CATALOG.parse_pod(pod)
    except RequestInvalid as error:
        return error
    assert request is not None
    return request


def _check(share: Share, device: Device) -> None:
    if share.memory_limit_mib:
        assert device.memory_mib >= share.memory_limit_mib > share.memory_mib
        assert device.capacity_mib <= device.memory_mib
    assert not share.core_limit_pct or share.core_limit_pct >= share.core_pct > 0


def _without(request: PodRequest) -> PodRequest:
    return replace(
        request,
        containers=tuple(
            replace(
                one,
                requests=tuple(
                    replace(asked, memory_limit_mib=0, core_limit_pct=0) for asked in one.requests
                ),
            )
            for one in request.containers
        ),
    )
