# SPDX-License-Identifier: Apache-2.0
"""MetaX: whole GPUs, and sGPUs with one QoS class for all shares of a device.

The class is the pod's annotation ``metax-tech.com/sgpu-qos-policy``, or ``online`` / ``offline`` of
``metax-tech.com/sgpu-app-class``; online pods are not counted in compute. An online pod may join
offline ones, an offline pod never joins an online one. Difference from HAMi v2.10: several
containers of a pod may have whole GPUs of their own. Memory in MiB; a bare number of ``vmemory`` is
GiB, one with letters is bytes, rounded up to the driver's step of 128 MiB.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from hami_common.errors import RequestInvalid
from hami_common.model.request import DeviceRequest
from hami_common.units import shown
from hami_common.vendors.handles import handle_of
from hami_common.vendors.protocol import Capability, RenderContext
from hami_common.vendors.sharing import (
    FULL_PCT,
    GIB_MIB,
    Asked,
    Description,
    Family,
    Given,
    Plan,
    SelectorKeys,
    ShareVendor,
    node,
    number_of,
    render_node,
)

NAME = "metax"
QOS = "metax-tech.com/sgpu-qos-policy"
APP_CLASS = "metax-tech.com/sgpu-app-class"
QOS_WORDS = ("best-effort", "fixed-share", "burst-share")
APP_WORDS = ("online", "offline")
PART_MODE = "sgpu"
_STEP_MIB = 128
_CONTROL_NODES = ("/dev/mxcd", "/dev/mxnd", "/dev/mxgd")


class MetaxSettings(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Section ``metax`` of the vendor configuration."""

    resource_count_name: str = "metax-tech.com/gpu"
    resource_v_count_name: str = "metax-tech.com/sgpu"
    resource_v_memory_name: str = "metax-tech.com/vmemory"
    resource_v_core_name: str = "metax-tech.com/vcore"
    resource_aliases: dict[str, str] = {}
    runtime_class: str = ""


def _word(annotations: Mapping[str, str], key: str, words: tuple[str, ...]) -> str:
    word = annotations.get(key, "").strip()
    if word and word not in words:
        raise RequestInvalid(
            field=f"annotation {key}",
            problem=f"{shown(word)} is not a class",
            fix=f"write one of {', '.join(words)}",
        )
    return word


class Metax(ShareVendor):
    """Pure half of the vendor MetaX."""

    def __init__(self, settings: MetaxSettings | None = None) -> None:
        """Use ``settings``, else the defaults HAMi ships."""
        s = settings or MetaxSettings()
        self._sliced = s.resource_v_count_name
        super().__init__(
            Description(
                name=NAME,
                families=(
                    Family(count=s.resource_count_name),
                    Family(
                        count=s.resource_v_count_name,
                        memory=s.resource_v_memory_name,
                        cores=s.resource_v_core_name,
                        unit_mib=GIB_MIB,
                        takes_bytes=True,
                        default_core_pct=FULL_PCT,
                    ),
                ),
                aliases=dict(s.resource_aliases),
                selectors=SelectorKeys(
                    allow_uuids=("metax-tech.com/use-gpuuuid",),
                    deny_uuids=("metax-tech.com/nouse-gpuuuid",),
                ),
                runtime_class=s.runtime_class,
                node_env=("MACA_VISIBLE_DEVICES", "METAX_SGPUS"),
                runtime_reads_env=False,
                capability=Capability(
                    memory_enforced="sGPU",
                    compute_enforced="sGPU",
                    partitioned="the agent, through MXSML or mx-smi (sGPU)",
                ),
            )
        )

    def refine(self, asked: Asked, annotations: Mapping[str, str]) -> DeviceRequest:
        """An sGPU has a class, and is on a device in sGPU mode."""
        if asked.family.count != self._sliced:
            return asked.request
        app = _word(annotations, APP_CLASS, APP_WORDS)
        qos = _word(annotations, QOS, QOS_WORDS) or QOS_WORDS[0]
        memory_mib = -(-asked.request.memory_mib // _STEP_MIB) * _STEP_MIB
        request = replace(asked.request, memory_mib=memory_mib, kind=app or qos, modes=(PART_MODE,))
        if app and request.count != 1:
            raise RequestInvalid(
                field=asked.field(asked.family.count),
                problem=f"a container of class {app} has one sGPU",
                fix="write 1",
            )
        if app == "online":
            return replace(request, core_pct=0, exclusive=False)
        return request

    def plan(self, given: Sequence[Given], context: RenderContext) -> Plan:
        """SGPUs by the driver's number.

        ``handles``: ``sgpu``, the number of the sGPU on its device, and ``alias``, its owner.
        """
        slices = []
        nodes = [node(path, optional=path != _CONTROL_NODES[0]) for path in _CONTROL_NODES]
        for share, device in given:
            nodes += [node(f"/dev/dri/card{number_of(device)}"), render_node(device)]
            sgpu = handle_of(share, device, context, "sgpu")
            alias = context.handles.get(device.uuid, {}).get("alias", "")
            if sgpu:
                words = [
                    f"sgpu={device.bus_id}#{sgpu}",
                    f"compute={share.core_pct or FULL_PCT}",
                    f"vram={share.memory_mib}",
                    *([f"alias={alias}"] if alias else []),
                ]
                slices.append(";".join(words))
        env = {"METAX_SGPUS": ",".join(slices)} if slices else {}
        return Plan(env=env, nodes=tuple(nodes))
