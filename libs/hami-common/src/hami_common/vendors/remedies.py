# SPDX-License-Identifier: Apache-2.0
"""Annotations by which a pod can lift a refusal of the scheduler, by vendor.

Collected from the vendors with their default settings; pure, and independent of devices.
"""

from functools import cache

from msgspec import Struct

from hami_common.model.request import DeviceRequest
from hami_common.vendors import ascend, metax, nvidia
from hami_common.vendors.catalog import Catalog
from hami_common.vendors.sharing import ShareVendor


class Remedies(Struct, frozen=True, kw_only=True):
    """Keys of the annotations of one vendor; empty where it has none."""

    allow_types: tuple[str, ...] = ()
    deny_types: tuple[str, ...] = ()
    allow_uuids: tuple[str, ...] = ()
    deny_uuids: tuple[str, ...] = ()
    numa_bind: str = ""
    mode: str = ""
    modes: tuple[tuple[str, str], ...] = ()
    """(mode of devices, word of the annotation ``mode`` that accepts it; empty: no annotation)."""
    kinds: tuple[tuple[str, str], ...] = ()
    """(kind of shares, annotation that selects it)."""

    def key_of_kind(self, kind: str) -> str:
        """Return the annotation that selects a kind of shares; empty: none does."""
        return dict(self.kinds).get(kind, "")


_NONE = Remedies()
_NVIDIA = Remedies(
    allow_types=(nvidia.USE_TYPE,),
    deny_types=(nvidia.NO_USE_TYPE,),
    allow_uuids=(nvidia.USE_UUID,),
    deny_uuids=(nvidia.NO_USE_UUID,),
    numa_bind=nvidia.NUMA_BIND,
    mode=nvidia.MODE,
    modes=(("mig", "mig"), ("soft", "hami-core"), ("timeslice", "timeslice"), ("mps", "mps")),
)
_MODE_BY_VENDOR = {
    ascend.NAME: (ascend.MODE, (("soft", ascend.SOFT_WORD), (ascend.PART_MODE, ""))),
}
_KINDS_BY_VENDOR = {
    metax.NAME: (
        *((word, metax.QOS) for word in metax.QOS_WORDS),
        *((word, metax.APP_CLASS) for word in metax.APP_WORDS),
    ),
}


@cache
def _by_vendor() -> dict[str, Remedies]:
    found = {nvidia.NAME: _NVIDIA}
    for vendor in Catalog.from_settings().vendors:
        if isinstance(vendor, ShareVendor):
            keys = vendor.about.selectors
            mode, modes = _MODE_BY_VENDOR.get(vendor.name, ("", ()))
            found[vendor.name] = Remedies(
                allow_types=keys.allow_types,
                deny_types=keys.deny_types,
                allow_uuids=keys.allow_uuids,
                deny_uuids=keys.deny_uuids,
                mode=mode,
                modes=modes,
                kinds=_KINDS_BY_VENDOR.get(vendor.name, ()),
            )
    return found


def remedies_of(vendor: str) -> Remedies:
    """Return the annotations of a vendor."""
    return _by_vendor().get(vendor, _NONE)


def one_of(keys: tuple[str, ...], request: DeviceRequest) -> str:
    """Return the key for the request: of one key per device type, that of a type it names."""
    if len(keys) == 1:
        return keys[0]
    return next((key for key in keys if any(word in key for word in request.types)), "")
