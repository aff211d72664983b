# SPDX-License-Identifier: Apache-2.0
"""Answers with the catalog of SKUs that is in force (ADR 45).

Every authenticated caller may read it: users choose from it. Memory in MiB and compute in percent,
both per device.
"""

from collections.abc import Callable
from typing import Final

from msgspec import Struct, field

from hami_common.runtime.httpd import Request, Response, json_response
from hami_common.runtime.openapi import Operation
from hami_common.runtime.watchedfile import WatchedFile
from hami_common.skus.catalog import Sku, SkuCatalog

_CONTAINER: Final = "main"


class SkuAlternative(Struct, frozen=True, kw_only=True):
    """One vendor by which a SKU can be served."""

    vendor: str
    types: tuple[str, ...]
    """Accepted device types; empty: every type."""
    limits: dict[str, str]
    """Limits that a container would have for the same devices of this vendor."""
    annotations: dict[str, str]
    """Annotations with which the pod is read: the vendor's, and limits above the request."""


class SkuView(Struct, frozen=True, kw_only=True):
    """One SKU."""

    name: str
    version: int
    state: str
    """``active``, or ``retired``: new pods are refused."""
    successor: str
    service_class: str = field(name="class")
    """``guaranteed``, ``burstable`` or ``spot``; recorded with each allocation."""
    devices: int
    memory_mib: int
    """0: the whole device."""
    compute_pct: int
    """0: the vendor's default."""
    memory_limit_mib: int
    """MiB of each device up to which a pod may exceed ``memory_mib``; 0: none."""
    compute_limit_pct: int
    """Percent of each device that a pod may use while it computes alone there; 0: as configured."""
    link: str
    min_isolation: str
    price_hour: float
    """Price per hour of one pod, in ``currency``."""
    alternatives: tuple[SkuAlternative, ...]
    """In order of preference."""


class SkuList(Struct, frozen=True, kw_only=True):
    """The catalog in force."""

    digest: str
    """SHA-256 of the file, as ``sha256sum`` prints it; empty without a file."""
    problem: str
    """Reason for which the present file is not in force; empty when it is."""
    currency: str
    required: bool
    """Pods that ask for devices without a SKU are refused."""
    neutral: tuple[str, ...]
    """Vendors of pods that name neutral resources without a SKU, in order of preference."""
    items: tuple[SkuView, ...]
    """In the order of the file."""


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        path="/v1/skus",
        name="skus",
        text="SKUs that pods may ask for, with versions, prices and what they expand to.",
        answer=SkuList,
    ),
)


class SkuApi:
    """Handler of the operation."""

    def __init__(self, file: WatchedFile[SkuCatalog]) -> None:
        """Answer with the catalog of ``file``."""
        self._file = file

    async def skus(self, request: Request) -> Response:
        """See ``OPERATIONS``."""
        del request
        catalog = self._file.value
        return json_response(
            SkuList(
                digest=catalog.digest,
                problem=self._file.problem,
                currency=catalog.file.currency,
                required=catalog.file.required,
                neutral=tuple(dict.fromkeys(one.vendor for one in catalog.file.neutral)),
                items=tuple(map(_viewer(catalog), catalog.skus)),
            )
        )


def _viewer(catalog: SkuCatalog) -> Callable[[Sku], SkuView]:
    def view(sku: Sku) -> SkuView:
        return SkuView(
            name=sku.name,
            version=sku.version,
            state=sku.state,
            successor=sku.successor,
            service_class=sku.service_class,
            devices=sku.devices,
            memory_mib=sku.memory_mib,
            compute_pct=sku.compute_pct,
            memory_limit_mib=sku.memory_limit_mib,
            compute_limit_pct=sku.compute_limit_pct,
            link=sku.link,
            min_isolation=sku.min_isolation,
            price_hour=sku.price_hour,
            alternatives=tuple(
                SkuAlternative(
                    vendor=one.vendor,
                    types=one.types,
                    limits=one.limits[_CONTAINER],
                    annotations=one.annotations,
                )
                for one in catalog.expand(sku, _CONTAINER)
            ),
        )

    return view
