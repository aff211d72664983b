# SPDX-License-Identifier: Apache-2.0
"""Systems from which nodes migrate with running pods, and the annotations each of them uses.

HAMi 2.10, and Volcano's scheduler with ``volcano-vgpu-device-plugin``. Both record devices in
annotations of pods and nodes; an ``Origin`` names the keys and holds the decoders, so that taking
pods over and migrating nodes is the same code for both. ``Origin.name`` is the ``origin`` of ledger
records and signed allocations. Pure.
"""

from collections.abc import Callable, Mapping
from typing import Final, Literal

from msgspec import Struct

from hami_common.compat import hamiformat, volcano
from hami_common.compat.hamiformat import Given, Registered, Word
from hami_common.vendors.catalog import Catalog, VendorSettings
from hami_common.vendors.nvidia import NvidiaSettings

OriginName = Literal["hami", "volcano"]


class Origin(Struct, frozen=True, kw_only=True):
    """A system whose pods are taken over."""

    name: OriginName
    title: str
    """In messages."""
    words: tuple[Word, ...]
    decode_shares: Callable[[str, str], tuple[tuple[Given, ...], ...]]
    """Devices by container, from a pod's annotation with this key; ``WireInvalid``."""
    decode_register: Callable[[str, Word], tuple[Registered, ...]]
    """Devices of a node, from its annotation; ``WireInvalid``."""
    node: str
    """Annotation of a pod with the name of its node."""
    phase: str
    """Annotation of a pod that is ``hamiformat.BINDING`` while its devices are allocated."""
    mig: str = ""
    """Annotation of a pod with its MIG instances; empty: the ids of its devices contain them."""
    serves_init: bool = True
    """True: init containers have shares, and each container may have an entry of its own."""
    in_units: bool = False
    """True: memory is in the unit of requests (``ResourceNames.memory_unit_mib``), not in MiB."""
    other_keys: tuple[str, ...] = ()
    """Further annotations of a node that end with its registration."""
    is_ours: Callable[[Mapping[str, str]], bool] = lambda _: False
    """Returns true if this project's agent has written a node's registration."""
    mirrored_by: str
    """Setting by which this system counts our pods, as an instruction."""
    catalog: Catalog
    """Names of resources, with default settings."""

    @property
    def node_keys(self) -> tuple[str, ...]:
        """Return the annotations of a node that offer its devices, or lock it."""
        own = [key for word in self.words for key in (word.register, word.handshake) if key]
        return (*own, *self.other_keys)

    def is_placed(self, annotations: Mapping[str, str]) -> bool:
        """Return whether a pod's annotations show that it was given devices."""
        return any(annotations.get(word.allocated, "").strip(" ;") for word in self.words)

    def uses_mig(self, annotations: Mapping[str, str]) -> bool:
        """Return whether a pod's annotations name MIG instances."""
        if self.mig:
            return bool(annotations.get(self.mig, "").strip(" []"))
        return any("[" in annotations.get(word.allocated, "") for word in self.words)

    def registers(self, annotations: Mapping[str, str]) -> bool:
        """Return whether a node's annotations offer its devices to this system."""
        is_registered = any(annotations.get(word.register) for word in self.words)
        return is_registered and not self.is_ours(annotations)


def _decode_hami(text: str, key: str) -> tuple[tuple[Given, ...], ...]:
    return hamiformat.decode_shares(text, what=f"annotation {key}")


HAMI: Final = Origin(
    name="hami",
    title="HAMi",
    words=hamiformat.WORDS,
    decode_shares=_decode_hami,
    decode_register=hamiformat.decode_register,
    node=hamiformat.NODE,
    phase=hamiformat.BIND_PHASE,
    mig=hamiformat.MIG,
    other_keys=("hami.io/node-nvidia-score", "hami.io/mutex.lock", "cambricon.com/dsmlu.lock"),
    mirrored_by="set mirror_pods = true in the scheduler's settings (component hami-mirrors)",
    catalog=Catalog.from_settings(),
)
VOLCANO: Final = Origin(
    name="volcano",
    title="Volcano",
    words=(
        Word(
            vendor="nvidia",
            word="NVIDIA",
            allocated=volcano.POD_IDS,
            register=volcano.REGISTER,
            handshake=volcano.HANDSHAKE,
        ),
    ),
    decode_shares=volcano.decode_shares,
    decode_register=volcano.decode_register,
    node=volcano.POD_NODE,
    phase=volcano.BIND_PHASE,
    serves_init=False,
    in_units=True,
    other_keys=(volcano.NODE_LOCK,),
    is_ours=volcano.is_ours,
    mirrored_by="add volcano to vendors.nvidia.dialects in the scheduler's settings (component "
    "volcano)",
    catalog=Catalog.from_settings(VendorSettings(nvidia=NvidiaSettings(dialects=("volcano",)))),
)
ORIGINS: Final[Mapping[str, Origin]] = {one.name: one for one in (HAMI, VOLCANO)}


def title_of(name: str) -> str:
    """Return the title of an origin in a record, also of one that is unknown here."""
    origin = ORIGINS.get(name)
    return name if origin is None else origin.title
