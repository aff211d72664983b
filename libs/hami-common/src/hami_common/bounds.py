# SPDX-License-Identifier: Apache-2.0
"""States the range of every number, text and list that comes from outside.

The types below are used by the messages on the bus, the annotations and the Kubernetes documents
that we read; msgspec checks them while it decodes, so that a value out of range never reaches a
decision. The table "Ranges" of docs/wire.md is generated from this module. A limit is far above
what any cluster needs and below what a column of the scheduler's table (32 and 64 bits) or a file
can hold. Characters of names are checked where names become subjects or paths: ``subjects``,
``apipath``.
"""

from typing import Annotated, Final

from msgspec import Meta

INT32_MAX: Final = (1 << 31) - 1
INT64_MAX: Final = (1 << 63) - 1
UINT64_MAX: Final = (1 << 64) - 1

INDEX_MOST: Final = 4095
NUMA_MOST: Final = 1023
MEMORY_MIB_MOST: Final = INT32_MAX
SCALING_MOST: Final = 100
SLOTS_MOST: Final = 1024
RESOURCE_MOST: Final = (1 << 14) - 1
"""Twice this fits into the 16 bits of the scheduler's columns of partition resources."""
WEIGHT_MOST: Final = 999_999
RUNTIME_MOST_S: Final = 1e9
"""Longest protection from eviction that a pod can ask for, seconds: some 30 years."""
DEVICES_MOST: Final = 256
"""Most devices of one vendor on one node that are used."""
NODE_DEVICES_MOST: Final = 512
"""Devices of all vendors on one node: the scheduler keeps a matrix of their links."""
REPORTED_MOST: Final = 1024
"""Devices of one report; those beyond ``DEVICES_MOST`` are named as a problem."""
POD_CONTAINERS_MOST: Final = 200
"""Containers of a pod that asks for devices."""
CONTAINERS_MOST: Final = 512
"""Containers of one ledger record; more than of a pod, for pods that HAMi placed."""
SHARES_MOST: Final = 1024
"""Shares of one container."""
LIST_MOST: Final = 65_536
"""Entries of a list that only its writer bounds: shares of a node, findings, classes of nodes."""
LINKS_MOST: Final = LIST_MOST
"""Pairs of devices of one vendor on one node."""
PROFILES_MOST: Final = 256
"""Sizes of partitions of one device, and places of one size."""
OBJECT_LIST_MOST: Final = 1 << 17
"""Entries of a list in a Kubernetes object; the API server's limit on objects is lower."""
ATTRIBUTES_MOST: Final = 256
"""Entries of a map of facts."""
VENDORS_MOST: Final = 64
USAGE_LABELS_MOST: Final = 8
"""Labels of a pod that its allocation records."""
WORDS_MOST: Final = LIST_MOST
"""Words of a list in an annotation."""
BEFORE_MOST: Final = 16
"""Decisions of one attempt that one message carries."""
NAME_MOST: Final = 253
LABEL_MOST: Final = 63
UID_MOST: Final = 128
TEXT_MOST: Final = 65_536
OBJECT_MOST: Final = 3 << 20
"""The API server's own limit of a request body, in bytes."""

# --- numbers --------------------------------------------------------------------------------------

Index = Annotated[int, Meta(ge=0, le=INDEX_MOST)]
"""Position of a device in its vendor's enumeration."""
Minor = Annotated[int, Meta(ge=0, le=(1 << 20) - 1)]
"""Minor number of a device node: 20 bits in Linux."""
Numa = Annotated[int, Meta(ge=-1, le=NUMA_MOST)]
"""NUMA node; -1: no affinity."""
MemoryMib = Annotated[int, Meta(ge=0, le=MEMORY_MIB_MOST)]
"""Memory of a device or a share, MiB."""
CapacityMib = Annotated[int, Meta(ge=0, le=MEMORY_MIB_MOST * SCALING_MOST)]
"""Memory that a device hands out, MiB: physical memory times the largest scaling."""
Amount = Annotated[int, Meta(ge=0, le=(1 << 53) - 1)]
"""Amount in use now, as drivers and processes report it: exact in every JSON reader."""
CorePct = Annotated[int, Meta(ge=0, le=100)]
"""Compute of one device, percent."""
CapacityCorePct = Annotated[int, Meta(ge=0, le=100 * SCALING_MOST)]
"""Compute that a device hands out, percent: 100 times the largest scaling."""
Slots = Annotated[int, Meta(ge=0, le=SLOTS_MOST)]
"""Containers that may share a device."""
HardwareShares = Annotated[int, Meta(ge=0, le=(1 << 16) - 1)]
"""Shares that the hardware allows at a time."""
Resource = Annotated[int, Meta(ge=0, le=RESOURCE_MOST)]
"""Amount of a named resource that partitions take."""
GridPosition = Annotated[int, Meta(ge=0, le=1023)]
"""Position or length on a device's grid; grids of more than 16 positions are not divided."""
Count = Annotated[int, Meta(ge=0, le=INT32_MAX)]
"""Number of items."""
Counter = Annotated[int, Meta(ge=0, le=INT64_MAX)]
"""Counter that only grows."""
Sequence = Annotated[int, Meta(ge=0, le=INT64_MAX)]
"""Sequence, revision or generation: JetStream's are 64 bits."""
SignedInt32 = Annotated[int, Meta(ge=-INT32_MAX - 1, le=INT32_MAX)]
"""Kubernetes ``int32``, such as the priority of a pod."""
SignedInt64 = Annotated[int, Meta(ge=-INT64_MAX - 1, le=INT64_MAX)]
"""Kubernetes ``int64``."""
TaskPriority = Annotated[int, Meta(ge=0, le=INT32_MAX)]
"""Priority of a container's work on a device; 0 is the highest."""
LinkScore = Annotated[int, Meta(ge=0, le=INT32_MAX)]
"""Strength of the connection between two devices."""
Weight = Annotated[int, Meta(ge=0, le=WEIGHT_MOST)]
"""Weight of one term of a score: at most 6 digits."""
UnixS = Annotated[float, Meta(ge=0, le=253_402_300_799)]
"""Unix seconds, up to the end of the year 9999."""
Duration = Annotated[float, Meta(ge=0, le=1e12)]
"""Length of time, in the unit that the field's name states."""
Score = Annotated[float, Meta(ge=-1e6, le=1e6)]
"""Score of a node."""

Strength = Annotated[float, Meta(ge=0, le=1e12)]
"""Sum of strengths of links, of levels of a network, or of amounts."""
Fraction = Annotated[float, Meta(ge=0, le=SCALING_MOST)]
"""Part of a whole; above 1 where more is in use than there is."""

# --- texts, in characters -------------------------------------------------------------------------

Name = Annotated[str, Meta(max_length=NAME_MOST)]
"""Name of a node, pod or other object: a DNS subdomain."""
Label = Annotated[str, Meta(max_length=LABEL_MOST)]
"""Name of a namespace or container: a DNS label."""
Uid = Annotated[str, Meta(max_length=UID_MOST)]
"""UID of a pod, allocation id, request id."""
BootId = Annotated[str, Meta(max_length=64)]
"""Start of an agent; sorts by time."""
Vendor = Annotated[str, Meta(max_length=LABEL_MOST)]
"""Vendor word."""
DeviceId = Annotated[str, Meta(max_length=320)]
"""UUID of a device, or HAMi's name of it: node name, word and number."""
Word = Annotated[str, Meta(max_length=NAME_MOST)]
"""Stable word: type, mode, kind, profile, code, version, address."""
Reference = Annotated[str, Meta(max_length=NAME_MOST + LABEL_MOST + 64)]
"""Word with a namespace and a name, such as ``gang <namespace>/<name>``."""
Text = Annotated[str, Meta(max_length=TEXT_MOST)]
"""Sentence for people, or a vendor's own fact."""
MapKey = Annotated[str, Meta(max_length=NAME_MOST + 1 + LABEL_MOST)]
"""Key of a label, annotation, resource or attribute: prefix, ``/`` and name."""
AnnotationValue = Annotated[str, Meta(max_length=1 << 18)]
"""Value of an annotation; Kubernetes allows 256 KiB for all of an object together."""
Quantity = Annotated[str, Meta(max_length=1024)]
"""Kubernetes quantity as text; one of our resources has at most 64 characters."""
ObjectText = Annotated[str, Meta(max_length=OBJECT_MOST)]
"""Any other text in a Kubernetes object: the API server limits the object."""

# --- lists and maps -------------------------------------------------------------------------------

Resources = Annotated[dict[MapKey, Resource], Meta(max_length=ATTRIBUTES_MOST)]
"""Named resources of a device or a partition."""
Attributes = Annotated[dict[MapKey, Text], Meta(max_length=ATTRIBUTES_MOST)]
"""Further facts of a device."""
Words = Annotated[tuple[AnnotationValue, ...], Meta(max_length=WORDS_MOST)]
"""Words of a comma separated annotation."""
