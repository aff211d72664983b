# SPDX-License-Identifier: Apache-2.0
"""Keys that we read from and write to Kubernetes objects, and the keys that users may not write.

User-facing keys are those HAMi's users already have in their manifests (v2.10); ours live under
``hami.io/`` and ``*.limits.hami.io/``. The name part of a key (after ``/``) has at most 63
characters, the prefix is a DNS subdomain (Kubernetes API conventions).
"""

# written by users
NODE_POLICY = "hami.io/node-scheduler-policy"
DEVICE_POLICY = "hami.io/gpu-scheduler-policy"
SCORING_WEIGHTS = "hami.io/device-scoring-weights"
WEBHOOK_LABEL = "hami.io/webhook"
WEBHOOK_IGNORE = "ignore"
DEVICE_CORDON = "hami.io/device-cordon"
DEVICE_CORDON_REASONS = "hami.io/device-cordon-reasons"
QUEUE_LABEL = "hami.io/queue"
"""Label with the queue whose quota a pod counts under."""
KUEUE_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""The same by Kueue's label; a name that is none of our queues is left to Kueue."""
GANG = "hami.io/gang"
"""Annotation with the name of the pod's gang: its members are placed all or none."""
GANG_SIZE = "hami.io/gang-size"
"""Annotation with the number of members that the gang of ``GANG`` needs."""
MIN_RUNTIME = "hami.io/min-runtime-s"
"""Annotation with the seconds for which a pod that has started is not evicted for another one."""
MIN_ISOLATION = "hami.io/min-isolation"
"""Annotation with the least grades of isolation, see ``hami_common.model.isolation``."""
NO_MOVE = "hami.io/no-move"
"""Annotation, ``true``: plans to free capacity leave the pod where it is."""
ALLOCATION_MODE = "hami.io/allocation-mode"
"""Annotation of a pod, or label of a namespace: how pods get the devices of their resource limits,
``device-plugin`` or ``dra``.
"""

CLASS = "hami.io/class"
"""Annotation with the pod's class: ``guaranteed``, ``burstable`` or ``spot``."""
MEMORY_LIMIT = "hami.io/memory-limit"
"""Annotation with the MiB of each device up to which containers may exceed their requests: one
number, or ``<container>=<number>`` with commas.
"""
CORES_LIMIT = "hami.io/cores-limit"
"""The same for compute, in percent of one device."""
SKU = "hami.io/sku"
"""Annotation with the name of the SKU that the pod asks for."""

HOLD = "hami.io/hold"
"""Annotation with the uid of the Workload whose held shares the pod takes over; Kueue writes it."""
PROVISIONING_REQUEST = "autoscaling.x-k8s.io/consume-provisioning-request"
"""Annotation with the name of the ProvisioningRequest whose held shares the pod takes over."""

# written by us
MANAGED_LABEL = "hami.io/managed"
"""Label on every pod the webhook prepared (value ``true``): the selector of our list-and-watch."""
ALLOCATION = "hami.io/allocation"
"""Signed placement, written with the Binding only (design D4)."""
CLAIMED_RESOURCES = "hami.io/claimed-resources"
"""Our resources of each container, JSON, of a pod that gets them through a claim: the webhook moves
them here from the limits. It is immutable afterwards.
"""
ALTERNATIVES = "hami.io/alternatives"
"""Expansion of a vendor-neutral pod, JSON: see ``hami_common.skus.expansion``. It is immutable
afterwards.
"""
TRACEPARENT = "hami.io/traceparent"
"""W3C trace context of the pod's trace; the caller may set it, else the webhook starts one."""
RECALL_MEMORY = "hami.io/recall-memory"
"""Memory limits that the webhook raised for recall, as ``<container>=<limit>``, with commas."""
FENCE = "hami.io/fence"
"""Touched to move a pod's resourceVersion, which makes a late Binding fail (design D4)."""
CAPACITY_RETURNED = "hami.io/capacity-returned"
"""Touched on a node to wake kube-scheduler's queue after a release (design D16)."""

TAKEN_OVER = "hami.io/taken-over"
"""On a node that came over from HAMi: the pods that HAMi placed there, and its names of devices."""

ADVERTISED_AMOUNTS = "hami.io/advertised-amounts-"
"""Prefix of annotations on a node, by vendor: resources whose totals its agent writes into the
node's status.
"""

LIMITS_PREFIX_SUFFIX = ".limits.hami.io/"
LIMITS_VERSION = "v1"

# mirrors in HAMi's formats (design D21)
HAMI_NODE = "hami.io/vgpu-node"
HAMI_TIME = "hami.io/vgpu-time"
HAMI_BIND_TIME = "hami.io/bind-time"
HAMI_BIND_PHASE = "hami.io/bind-phase"

RESERVED = frozenset(
    {
        ALLOCATION,
        FENCE,
        HAMI_NODE,
        HAMI_TIME,
        HAMI_BIND_TIME,
        HAMI_BIND_PHASE,
        "hami.io/vgpu-mig-allocations",
        "hami.io/kunlun-allocated",
    }
)
"""Keys that only our scheduler may write; so are limits and the keys with these suffixes:"""
RESERVED_SUFFIXES = ("-devices-allocated", "-devices-to-allocate")


def advertised_amounts(vendor: str) -> str:
    """Annotation of a node with the resources whose totals a vendor's agent advertises."""
    return f"{ADVERTISED_AMOUNTS}{vendor}"


def limits(container: str) -> str:
    """Annotation that holds a container's limits file, projected to ``/etc/hami/limits``."""
    return f"{container}{LIMITS_PREFIX_SUFFIX}{LIMITS_VERSION}"


def is_reserved(key: str) -> bool:
    """True when only our scheduler may write ``key`` on a pod."""
    if key in RESERVED or LIMITS_PREFIX_SUFFIX in key:
        return True
    return key.startswith("hami.io/") and key.endswith(RESERVED_SUFFIXES)
