# SPDX-License-Identifier: Apache-2.0
"""Names of our driver, its pools, devices and capacities (``resource.k8s.io/v1``).

The node agent publishes devices under these names, kube-scheduler writes them into claims, and the
scheduler and the agent read them there. No other module makes or takes apart such a name.
"""

import re
from hashlib import sha256
from typing import Final

GROUP: Final = "resource.k8s.io"
VERSION: Final = "v1"
DRIVER: Final = "gpu.hami.io"
"""Driver of all vendors' devices; also the domain of attributes and capacities."""
MEMORY: Final = "memory"
"""Capacity: device memory of a share in bytes; a request without it takes the whole device."""
CORES: Final = "cores"
"""Capacity: compute of a share in percent of a device; a request without it has no limit."""
SLOTS: Final = "slots"
"""Capacity: number of shares, 1 for each request."""
PROFILE: Final = "profile"
"""Attribute of hardware partitions, which no other device has: their size, such as ``1g.10gb``."""
FULL: Final = f"{DRIVER}/full"
"""Taint of a device that can take no share more, which its capacities cannot say."""
UNHEALTHY: Final = f"{DRIVER}/unhealthy"
"""Taint of a device with a fault."""
CORDONED: Final = f"{DRIVER}/cordoned"
"""Taint of a device that an operator took out of service."""
CDI_KIND: Final = f"{DRIVER}/share"
"""Kind of the CDI devices by which containers get the shares of a claim's request."""
SOFT_MODE: Final = "soft"
"""Mode of devices that claims share: memory and compute are enforced by limits."""
VENDORS_BY_ANNOTATION: Final = frozenset({"ascend", "awsneuron", "cambricon", "kunlunxin"})
"""Vendors whose runtimes read annotations of the container, which CDI cannot set."""
BOOKED: Final = "hami.io/Booked"
"""Condition of an allocated device in the claim's status: False with the reason of a refusal; True
after a refused claim was booked.
"""
SHARE_CLASS: Final = "hami-share"
"""DeviceClass of shares."""
WHOLE_CLASS: Final = "hami-whole"
"""DeviceClass of whole devices."""
MONITOR: Final = "monitor"
"""Device that stands for all devices of a node, without a share of any; also its attribute."""
PARTITION_CLASS: Final = "hami-mig"
"""DeviceClass of hardware partitions."""
CLASSES: Final = (SHARE_CLASS, WHOLE_CLASS, PARTITION_CLASS)
"""DeviceClasses of the component ``dra``."""
CLAIMS_CDI: Final = "claims-cdi"
"""Check of the node agent: whether the configuration of the container runtime names CDI."""
_LABEL_MOST: Final = 63
_NAME_MOST: Final = 253
_HASH_DIGITS: Final = 10


def pool_name(node: str) -> str:
    """Return the name of the node's pool.

    Not the node's name alone: kube-scheduler 1.36 keeps counters by the name of the pool, without
    the driver.
    """
    return f"{node}/hami"


def node_of_pool(pool: str) -> str:
    """Return the node of a pool of ours; empty for any other name."""
    node, _, rest = pool.partition("/")
    return node if rest == "hami" else ""


def monitor_pool(node: str) -> str:
    """Return the name of the pool that has the node's device ``MONITOR`` alone."""
    return f"{node}/hami-{MONITOR}"


def node_of_any_pool(pool: str) -> str:
    """Return the node of a pool of ours, that of ``MONITOR`` included; empty for another name."""
    node = pool.partition("/")[0]
    return node if pool in (pool_name(node), monitor_pool(node)) else ""


def device_name(uuid: str) -> str:
    """Return the name of a device: a DNS label that depends on the UUID alone.

    UUIDs that differ only in characters which a label lacks, or beyond its length, get different
    names by a hash.
    """
    label = re.sub(r"[^a-z0-9]+", "-", uuid.lower()).strip("-")
    if label == uuid and len(label) <= _LABEL_MOST:
        return label
    digest = sha256(uuid.encode()).hexdigest()[:_HASH_DIGITS]
    return f"{label[: _LABEL_MOST - _HASH_DIGITS - 1].strip('-')}-{digest}".strip("-")


def partition_name(uuid: str, profile: str, start: int) -> str:
    """Return the name of a device's hardware partition of this size at this place.

    Sizes whose names differ in signs only, as ``1g.24gb+me`` and ``1g.24gb-me``, have two names.
    """
    digest = sha256(uuid.encode()).hexdigest()[:_HASH_DIGITS]
    size = profile.lower().replace("-", "-no-").replace("+", "-plus-").replace(".", "-")
    return device_name(f"mig-{digest}-{size}-{start}")


def slice_name(node: str, number: int) -> str:
    """Return the name of the node's slice with this number, from 0."""
    return _slice_name(node, str(number))


def monitor_slice(node: str) -> str:
    """Return the name of the slice with the node's device ``MONITOR``."""
    return _slice_name(node, MONITOR)


def _slice_name(node: str, suffix: str) -> str:
    name = f"{node}-{DRIVER}-{suffix}"
    if len(name) <= _NAME_MOST:
        return name
    digest = sha256(node.encode()).hexdigest()[:_HASH_DIGITS]
    return f"{digest}-{DRIVER}-{suffix}"


def share_name(claim_uid: str, request: str) -> str:
    """Return the name of the CDI device of one request; unique for all time, as runtimes cache."""
    return f"{claim_uid}-{request}"
