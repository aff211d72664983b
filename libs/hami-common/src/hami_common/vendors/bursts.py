# SPDX-License-Identifier: Apache-2.0
"""Limits above the requests of a pod's containers, from its annotations (ADR 52).

A limit needs a share that the in-container library limits: no whole device, hardware partition or
mode with limits of its own. Memory in MiB and compute in percent, both of each device.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec.structs import replace

from hami_common.bounds import MEMORY_MIB_MOST
from hami_common.errors import RequestInvalid
from hami_common.model.request import (
    NAMED_MODES,
    PARTITION_MODES,
    ContainerRequest,
    DeviceRequest,
    DeviceSelector,
)
from hami_common.pods import annotations as keys
from hami_common.pods.podview import PodView
from hami_common.skus.expansion import GUARANTEED, class_of
from hami_common.units import parse_count, shown
from hami_common.vendors.protocol import LIMITED_VENDORS

FULL_PCT: Final = 100
_UNIT: Final = {keys.MEMORY_LIMIT: "MiB", keys.CORES_LIMIT: "percent of one device"}
_MOST: Final = {keys.MEMORY_LIMIT: MEMORY_MIB_MOST, keys.CORES_LIMIT: FULL_PCT}
_EXAMPLE: Final = {keys.MEMORY_LIMIT: "main=6000", keys.CORES_LIMIT: "main=60"}


def with_limits(
    pod: PodView,
    containers: tuple[ContainerRequest, ...],
    selectors: Mapping[str, DeviceSelector],
    *,
    is_alternative: bool,
) -> tuple[ContainerRequest, ...]:
    """Return the containers' requests with the limits of the pod's annotations.

    ``is_alternative``: of a pod that names no vendor; a share that has no limit above its request
    is then left without one. ``RequestInvalid`` names the annotation and the fix.
    """
    for key in _UNIT:
        amounts = _amounts(pod, [one.name for one in containers], key)
        if amounts and class_of(pod.annotations()) == GUARANTEED:
            raise RequestInvalid(
                field=f"annotation {key}",
                problem=f"a pod of class {GUARANTEED} has no limit above its request",
                fix=f"remove it, or the annotation {keys.CLASS}",
            )
        if amounts:
            containers = tuple(
                _limited(one, key, amounts[one.name], selectors, is_alternative=is_alternative)
                if one.name in amounts
                else one
                for one in containers
            )
    return containers


def _limited(
    container: ContainerRequest,
    key: str,
    limit: int,
    selectors: Mapping[str, DeviceSelector],
    *,
    is_alternative: bool,
) -> ContainerRequest:
    """Return the container with one limit on all its devices."""
    found: list[DeviceRequest] = []
    for asked in container.requests:
        selector = selectors.get(asked.vendor, DeviceSelector())
        problem = without_limit(asked, selector, key)
        fix = f"remove it, or name only containers with shares, such as {_EXAMPLE[key]}"
        if problem and is_alternative:
            found.append(asked)
            continue
        if not problem:
            problem, fix = below(asked, key, limit)
        if problem:
            raise RequestInvalid(
                field=f"annotation {key}", problem=f"container {container.name} {problem}", fix=fix
            )
        found.append(
            replace(asked, memory_limit_mib=limit)
            if key == keys.MEMORY_LIMIT
            else replace(asked, core_limit_pct=limit)
        )
    return replace(container, requests=tuple(found))


def without_limit(asked: DeviceRequest, selector: DeviceSelector, key: str) -> str:
    """Return why shares as requested have no limit above the request; empty if they have one.

    ``key``: the annotation of the limit. The text follows the name of the container.
    """
    modes = {*(selector.modes or asked.modes)}
    if asked.vendor not in LIMITED_VENDORS:
        return f"requests devices of {asked.vendor}, which have no limits above the request"
    if asked.profile or asked.exact:
        size = asked.profile or "a hardware partition"
        return f"requests {size} of {asked.vendor}, whose size is fixed"
    if modes and modes <= {*PARTITION_MODES, *NAMED_MODES}:
        words = " or ".join(sorted(modes))
        return f"requests devices of {asked.vendor} in mode {words}, which has no such limits"
    if asked.exclusive:
        return f"requests whole devices of {asked.vendor}"
    is_all = not asked.memory_mib and asked.memory_pct == FULL_PCT
    if key == keys.MEMORY_LIMIT and is_all:
        return f"requests all memory of devices of {asked.vendor}"
    return ""


def below(asked: DeviceRequest, key: str, limit: int) -> tuple[str, str]:
    """Return why the limit is no limit above this request, and the fix; empty if it is one.

    The memory of a request in percent is known only on a device: the larger of both holds there.
    """
    if key == keys.MEMORY_LIMIT:
        request = asked.memory_mib
    else:
        request = asked.core_pct
        if not request:
            return (
                "requests no compute that the limit could exceed",
                "request compute, such as nvidia.com/gpucores: 30, or remove the limit",
            )
    if limit >= request:
        return "", ""
    unit = _UNIT[key]
    return (
        f"requests {request} {unit}, more than its limit of {limit}",
        f"write at least {request}, or request less",
    )


def _amounts(pod: PodView, asking: Iterable[str], key: str) -> dict[str, int]:
    """Return the amounts of an annotation by container; empty without one."""
    text = pod.annotations().get(key, "").strip()
    if not text:
        return {}
    if "=" not in text:
        return dict.fromkeys(asking, _amount(text, key))
    names, known = [*asking], {one.name for _, one in pod.containers_in_order()}
    found: dict[str, int] = {}
    for part in text.split(","):
        name, separator, number = (piece.strip() for piece in part.partition("="))
        problem = ""
        if not separator:
            problem = f"{shown(name)} is not a container and its limit"
        elif name in found:
            problem = f"names container {shown(name)} twice"
        elif name not in known:
            problem = f"names container {shown(name)}, which the pod does not have"
        elif name not in names:
            problem = f"names container {shown(name)}, which requests no devices"
        if problem:
            raise RequestInvalid(
                field=f"annotation {key}",
                problem=problem,
                fix=f"write one number for all, or name each of {', '.join(names)} at most once,"
                f" such as {_EXAMPLE[key].replace('main', names[0])}",
            )
        found[name] = _amount(number, key)
    return found


def _amount(text: str, key: str) -> int:
    amount = parse_count(
        text,
        field=f"annotation {key}",
        unit=_UNIT[key],
        at_most=_MOST[key],
        unit_mib=1 if key == keys.MEMORY_LIMIT else 0,
    )
    if not amount:
        raise RequestInvalid(
            field=f"annotation {key}", problem="0 is no limit", fix="write 1 or more, or remove it"
        )
    return amount
