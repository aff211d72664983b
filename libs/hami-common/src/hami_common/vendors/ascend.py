# SPDX-License-Identifier: Apache-2.0
"""Huawei Ascend: one set of names per chip, hard vNPUs by template, soft shares, 910C modules.

A part of a chip is rounded up to the smallest template that fits it; without a fitting template it
is the whole chip. The request has the requested amounts, the chip its templates
(``partitions_of``), so one name (``huawei.com/Ascend910``) can stand for several chips. With
``huawei.com/vnpu-mode: hami-core`` a share has exactly the requested size and only chips in that
mode serve it.

Deliberate differences from HAMi v2.10: types match exactly; AI CPUs are counted; a part of a 910C
is a part of one die, while whole ones come in modules of two; the rounded value is not written back
into the pod. Memory in MiB.
"""

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from hami_common.errors import RequestInvalid
from hami_common.model.device import Profile
from hami_common.model.placement import Share
from hami_common.model.request import DeviceRequest, DeviceSelector
from hami_common.pods.podview import ContainerView
from hami_common.units import shown
from hami_common.vendors.handles import handle_of
from hami_common.vendors.protocol import (
    Capability,
    ContainerChanges,
    DeviceNode,
    RenderContext,
)
from hami_common.vendors.sharing import (
    FULL_PCT,
    Asked,
    Description,
    Family,
    Given,
    Plan,
    SelectorKeys,
    ShareVendor,
    mount,
    node,
    number_of,
    numbers,
)

NAME = "ascend"
MODE = "huawei.com/vnpu-mode"
SOFT_WORD = "hami-core"
PART_MODE = "vnpu"
"""Mode of chips that templates divide."""
LIBRARY_DIR = "/hami-vnpu-core"
"""Container path of hami-vnpu-core, the in-container library for soft shares."""
REGION_DIR = "/hami-shared-region"
"""Container path of the directory in which the containers of a node account for each chip."""
SHARED_DIR = "/hami-vnpu-shmem"
"""Container path of the container's own accounts."""
_CONTROL_NODES = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
_DRIVER_PATHS = (
    "/usr/local/Ascend/driver/lib64",
    "/usr/local/Ascend/driver/version.info",
    "/usr/local/dcmi",
    "/usr/local/bin/npu-smi",
    "/etc/ascend_install.info",
)


class Template(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One size of vNPU."""

    name: str
    memory_mib: int
    ai_core: int
    ai_cpu: int = 0


class ChipSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One chip and the names under which pods request it."""

    word: str
    """Device type, as drivers report it."""
    resource_name: str
    resource_memory_name: str
    resource_core_name: str
    memory_allocatable_mib: int
    """Memory that a container can have of a whole chip."""
    memory_capacity_mib: int
    ai_core: int
    ai_cpu: int = 0
    """0: not counted."""
    templates: tuple[Template, ...] = ()
    super_pod: bool = False
    """Whole chips are given in modules of two."""


def _chip(
    word: str,
    memory_mib: tuple[int, int],
    units: tuple[int, int],
    *templates: tuple[str, int, int, int],
    super_pod: bool = False,
) -> ChipSettings:
    return ChipSettings(
        word=word,
        resource_name=f"huawei.com/{word}",
        resource_memory_name=f"huawei.com/{word}-memory",
        resource_core_name=f"huawei.com/{word}-core",
        memory_allocatable_mib=memory_mib[0],
        memory_capacity_mib=memory_mib[1],
        ai_core=units[0],
        ai_cpu=units[1],
        super_pod=super_pod,
        templates=tuple(
            Template(name=name, memory_mib=memory, ai_core=core, ai_cpu=cpu)
            for name, memory, core, cpu in templates
        ),
    )


_HALF, _FULL = (32768, 32768), (65536, 65536)
_20_CORES = (("vir05_1c_16g", 16384, 5, 1), ("vir10_3c_32g", 32768, 10, 3))
CHIPS = (
    _chip(
        "Ascend910A",
        _HALF,
        (30, 0),
        ("vir02", 2184, 2, 0),
        ("vir04", 4369, 4, 0),
        ("vir08", 8738, 8, 0),
        ("vir16", 17476, 16, 0),
    ),
    _chip(
        "Ascend910B2",
        _FULL,
        (24, 6),
        ("vir03_1c_8g", 8192, 3, 1),
        ("vir06_1c_16g", 16384, 6, 1),
        ("vir12_3c_32g", 32768, 12, 3),
    ),
    _chip("Ascend910B3", _FULL, (20, 7), *_20_CORES),
    _chip(
        "Ascend910B4",
        _HALF,
        (20, 7),
        ("vir05_1c_8g", 8192, 5, 1),
        ("vir10_3c_16g", 16384, 10, 3),
    ),
    _chip("Ascend910B4-1", _FULL, (20, 7), *_20_CORES),
    _chip("Ascend910C", _FULL, (20, 7), *_20_CORES, super_pod=True),
    _chip(
        "Ascend310P",
        (21527, 24576),
        (8, 7),
        ("vir01", 3072, 1, 1),
        ("vir02", 6144, 2, 2),
        ("vir04", 12288, 4, 4),
    ),
)
"""Chips of HAMi's configuration; the driver's own list of templates takes precedence."""


class AscendSettings(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Section ``ascend`` of the vendor configuration."""

    chips: tuple[ChipSettings, ...] = CHIPS
    any_910_name: str = "huawei.com/Ascend910"
    """Count of chips of any 910 kind; empty: there is no such name."""
    any_910_memory_name: str = "huawei.com/Ascend910-memory"
    any_910_core_name: str = "huawei.com/Ascend910-core"
    resource_aliases: dict[str, str] = field(
        default_factory=lambda: {
            f"huawei.com/ascend910{part}": f"huawei.com/Ascend910{part}"
            for part in ("", "-memory", "-core")
        }
    )
    runtime_class: str = ""
    """Runtime class for pods that have none; empty leaves the pod alone."""


def partitions_of(chip: ChipSettings) -> tuple[Profile, ...]:
    """The chip's templates as sizes of a device, the whole chip last."""
    whole = Template(
        name="", memory_mib=chip.memory_allocatable_mib, ai_core=chip.ai_core, ai_cpu=chip.ai_cpu
    )
    return tuple(
        Profile(
            name=template.name,
            memory_mib=template.memory_mib,
            core_pct=FULL_PCT * template.ai_core // chip.ai_core,
            resources={
                name: amount
                for name, amount in (("aicore", template.ai_core), ("aicpu", template.ai_cpu))
                if name in resources_of(chip)
            },
        )
        for template in (*chip.templates, whole)
    )


def resources_of(chip: ChipSettings) -> dict[str, int]:
    """Resources besides memory that vNPUs share."""
    return {"aicore": chip.ai_core, **({"aicpu": chip.ai_cpu} if chip.ai_cpu else {})}


def _families(settings: AscendSettings) -> tuple[Family, ...]:
    families = [
        Family(
            count=chip.resource_name,
            memory=chip.resource_memory_name,
            cores=chip.resource_core_name,
            types=(chip.word,),
        )
        for chip in settings.chips
    ]
    if settings.any_910_name:
        families.append(
            Family(
                count=settings.any_910_name,
                memory=settings.any_910_memory_name,
                cores=settings.any_910_core_name,
                types=tuple(c.word for c in settings.chips if c.word.startswith("Ascend910")),
            )
        )
    return tuple(families)


class Ascend(ShareVendor):
    """Pure half of the vendor Ascend."""

    def __init__(self, settings: AscendSettings | None = None) -> None:
        """Use ``settings``, else the chips HAMi ships."""
        self._settings = settings or AscendSettings()
        self._chip_by_type = {chip.word: chip for chip in self._settings.chips}
        words = tuple(self._chip_by_type)
        super().__init__(
            Description(
                name=NAME,
                families=_families(self._settings),
                aliases=dict(self._settings.resource_aliases),
                selectors=SelectorKeys(
                    allow_uuids=tuple(f"hami.io/use-{word}-uuid" for word in words),
                    deny_uuids=tuple(f"hami.io/no-use-{word}-uuid" for word in words),
                ),
                runtime_class=self._settings.runtime_class,
                node_env=(
                    "ASCEND_VISIBLE_DEVICES",
                    "ASCEND_VNPU_SPECS",
                    "ASCEND_RUNTIME_OPTIONS",
                    "NPU_MEM_QUOTA",
                    "NPU_PRIORITY",
                    "NPU_GLOBAL_SHM_PATH",
                    "NPU_LOCAL_SHM_PATH",
                ),
                capability=Capability(
                    memory_enforced="vNPU, hami-vnpu-core",
                    compute_enforced="vNPU, hami-vnpu-core",
                    partitioned="the agent, through DCMI or npu-smi (vNPU)",
                ),
            )
        )

    def refine(self, asked: Asked, annotations: Mapping[str, str]) -> DeviceRequest:
        """Templates or soft shares; whole 910C in modules."""
        request, family = asked.request, asked.family
        chips = [self._chip_by_type[word] for word in family.types]
        soft = annotations.get(MODE, "").strip() == SOFT_WORD
        if asked.cores and not soft:
            raise RequestInvalid(
                field=asked.field(family.cores),
                problem="compute of a chip that is divided follows from its memory",
                fix=f"remove it, or set annotation {MODE}: {SOFT_WORD}",
            )
        most = max(chip.memory_capacity_mib for chip in chips)
        if request.memory_mib > most:
            raise RequestInvalid(
                field=asked.field(family.memory),
                problem=f"{request.memory_mib} MiB is more than the chip has",
                fix=f"write at most {most}",
            )
        largest = max(t.memory_mib for chip in chips for t in chip.templates or (_NO_TEMPLATE,))
        limit = max(chip.memory_allocatable_mib for chip in chips) if soft else largest
        is_share = soft and request.core_pct < FULL_PCT
        if is_share or 0 < request.memory_mib <= limit:
            return self._part(asked, soft=soft)
        return self._whole(asked)

    def _part(self, asked: Asked, *, soft: bool) -> DeviceRequest:
        request = asked.request
        if request.count > 1 and not soft:
            raise RequestInvalid(
                field=asked.field(asked.family.count),
                problem="a container can have one vNPU only",
                fix=f"write 1, or leave {asked.family.memory} out for whole chips",
            )
        return replace(request, exclusive=False, modes=("soft",) if soft else (PART_MODE,))

    def _whole(self, asked: Asked) -> DeviceRequest:
        request, types = asked.request, asked.family.types
        request = replace(
            request, memory_mib=0, memory_pct=FULL_PCT, core_pct=FULL_PCT, exclusive=True
        )
        pairs = [word for word in types if self._chip_by_type[word].super_pod]
        if not pairs:
            return request
        if len(pairs) < len(types):
            return replace(request, types=tuple(word for word in types if word not in pairs))
        if request.count % 2 and request.count > 1:
            raise RequestInvalid(
                field=asked.field(asked.family.count),
                problem=f"{request.count} chips are not whole modules of two",
                fix=f"write {request.count - 1} or {request.count + 1}",
            )
        return replace(request, count=max(2, request.count), shape="pairs")

    def change(
        self, changes: ContainerChanges, container: ContainerView, request: DeviceRequest
    ) -> ContainerChanges:
        """Double the count for modules: a module is two chips for kubelet too."""
        family = self._family(container)
        if family is None or request.shape != "pairs":
            return changes
        counted = {family.count: str(request.count)}
        return replace(changes, set_limits={**changes.set_limits, **counted})

    def parse_selector(self, annotations: Mapping[str, str]) -> DeviceSelector:
        """UUIDs of any chip; the mode is part of the request."""
        word = annotations.get(MODE, "").strip()
        if word not in ("", SOFT_WORD):
            raise RequestInvalid(
                field=f"annotation {MODE}",
                problem=f"{shown(word)} is not a mode",
                fix=f"write {SOFT_WORD}, or leave it out for templates",
            )
        return super().parse_selector(annotations)

    def plan(self, given: Sequence[Given], context: RenderContext) -> Plan:
        """Plan the shares; the vendor's runtime creates missing vNPUs (``ASCEND_VNPU_SPECS``).

        ``handles``: ``vnpu_id`` of a vNPU that exists already. A soft share has the variables of
        hami-vnpu-core only together with its mounts (``library_mounts``).
        """
        env = {"ASCEND_VISIBLE_DEVICES": numbers(given)}
        mounts = [mount(path) for path in _DRIVER_PATHS]
        nodes = [node(path, permissions="rwm") for path in _CONTROL_NODES]
        for share, device in given:
            number = number_of(device)
            vnpu = handle_of(share, device, context, "vnpu_id")
            path = f"/dev/vdavinci{vnpu}" if vnpu else f"/dev/davinci{number}"
            inside = f"/dev/davinci{vnpu or number}"
            nodes.append(DeviceNode(host_path=path, container_path=inside, permissions="rwm"))
            if vnpu:
                env |= {"ASCEND_VISIBLE_DEVICES": vnpu, "ASCEND_RUNTIME_OPTIONS": "VIRTUAL"}
            elif share.profile:
                env["ASCEND_VNPU_SPECS"] = share.profile
        if context.library_mounts and given and is_soft_share(given[0].share):
            env |= _soft_env(given[0])
        return Plan(
            env=env, nodes=tuple(nodes), mounts=tuple(mounts), annotations=_annotations(given)
        )


_NO_TEMPLATE = Template(name="", memory_mib=0, ai_core=0)


def is_soft_share(share: Share) -> bool:
    """Return whether the share is a part of a chip that only hami-vnpu-core can enforce."""
    return share.vendor == NAME and not share.exclusive and not share.profile


def _soft_env(pair: Given) -> dict[str, str]:
    """Variables of hami-vnpu-core, which limits one device of a container."""
    return {
        "NPU_MEM_QUOTA": str(pair.share.memory_mib),
        "NPU_PRIORITY": str(pair.share.core_pct),
        "NPU_GLOBAL_SHM_PATH": f"{REGION_DIR}/{number_of(pair.device)}_global_registry",
        "NPU_LOCAL_SHM_PATH": f"{SHARED_DIR}/vnpu_local_shmem",
    }


def _annotations(given: Sequence[Given]) -> dict[str, str]:
    """``huawei.com/<word>``: the shares, for tools that read HAMi's record."""
    found: dict[str, list[dict[str, str | int]]] = {}
    for share, device in given:
        entry: dict[str, str | int] = {"UUID": share.uuid}
        if share.profile:
            entry["temp"] = share.profile
        entry["memory"] = share.memory_mib
        if share.core_pct and not share.profile and not share.exclusive:
            entry["core"] = share.core_pct
        found.setdefault(device.type, []).append(entry)
    return {
        f"huawei.com/{word}": msgspec.json.encode(entries).decode()
        for word, entries in found.items()
    }
