# SPDX-License-Identifier: Apache-2.0
"""Turns agents' raw reports into canonical inventory: validates, configures, orders.

The registry keeps the newest report per (node, vendor); a report is newer by (``boot_id``,
``seq``), as far as these can be trusted (``Runs``). The published records are a pure function of
report, configuration and cordons, so a change of any of them re-publishes exactly the records that
differ. Times come in as arguments.
"""

from collections.abc import Mapping

from hami_common.bounds import DEVICES_MOST
from hami_common.events.codec import out_of_range
from hami_common.events.inventory import NodeDevices, NodeReport
from hami_common.model.device import Device, DeviceFacts
from hami_registry.core.device_config import DeviceConfig, canonical_devices, use_of
from hami_registry.core.stranded import Holding, Stranded, stranded

MAX_DEVICES_PER_NODE = DEVICES_MOST
_PROBLEM_MOST = 4096
LATE = 16
"""Maximum difference between the numbers of delayed messages of an agent."""
JUMP = 2_000
"""Numbers of one run, some hours of it, by which a replica may lag behind another one."""
_Key = tuple[str, str]
"""(node, vendor)."""
_Order = tuple[str, int]
"""(boot_id, seq)."""


class Runs:
    """Judges which reports of an agent are older than a known one.

    Agents choose ``boot_id`` and ``seq`` themselves, so an attacker with a stolen login can choose
    values that the agent itself never exceeds. A report that is older by its numbers is therefore
    refused only until its run continues: until one of the same run follows whose number is more
    than ``LATE`` higher than that of the first one refused. Within one run that holds where the
    known report is ahead by more than ``JUMP``.
    """

    def __init__(self) -> None:
        self._refused: dict[_Key, _Order] = {}

    def is_older(self, key: _Key, new: _Order, known: _Order) -> bool:
        """Judge a report against the known one, and remember it if it is refused."""
        refused = self._refused.get(key)
        if refused is not None and refused[0] != new[0]:
            refused = None  # of another run
        if new >= known:
            if refused is not None:
                del self._refused[key]
            return False
        if refused is None:
            self._refused[key] = new
            return True
        is_near = new[0] == known[0] and known[1] - new[1] <= JUMP
        return is_near or new[1] <= refused[1] + LATE


def problems_of(report: NodeReport) -> list[str]:
    """Return the problems of a report, device by device.

    An invalid device is left out, not fatal.
    """
    problems: list[str] = []
    seen: set[str] = set()
    for facts in report.devices:
        problem = _problem_of(facts, report, seen)
        if problem:
            problems.append(f"device {facts.uuid or facts.index}: {problem}")
        seen.add(facts.uuid)
    if len(report.devices) > MAX_DEVICES_PER_NODE:
        problems.append(f"{len(report.devices)} devices; at most {MAX_DEVICES_PER_NODE} are used")
    return problems


def _problem_of(facts: DeviceFacts, report: NodeReport, seen: set[str]) -> str:
    if not facts.uuid or any(character in facts.uuid for character in " ,;:\n"):
        return f"uuid {facts.uuid!r} is empty or has a separator in it"
    if facts.uuid in seen:
        return "uuid appears twice"
    if facts.vendor != report.vendor:
        return f"vendor {facts.vendor!r} is not the report's {report.vendor!r}"
    if facts.memory_mib < 0 or facts.core_pct <= 0:
        return f"memory_mib {facts.memory_mib} or core_pct {facts.core_pct} cannot be"
    return out_of_range(facts)


class Inventory:
    """Newest reports, and their devices under the current configuration."""

    def __init__(self, config: DeviceConfig, *, generation: int = 1) -> None:
        """Start with no report and this configuration."""
        self._config = config
        self.generation = generation
        self._reports: dict[_Key, NodeReport] = {}
        self._runs = Runs()
        self._stored_runs = Runs()
        self._outlived: dict[_Key, _Order] = {}
        """The report with higher numbers that was superseded by a run that continues."""
        self._cordons: dict[str, frozenset[str]] = {}

    def accept(self, report: NodeReport) -> bool:
        """Store ``report`` if it is newer than the known one; returns whether it was stored."""
        key = (report.node, report.vendor)
        known = self._reports.get(key)
        if known is not None:
            if self._runs.is_older(key, _order(report), _order(known)):
                return False
            if _order(report) < _order(known):
                self._outlived[key] = _order(known)
        self._reports[key] = report
        return True

    def outlives(self, ours: NodeDevices, stored: NodeDevices) -> bool:
        """Return whether ``ours`` is to be published over a record of higher numbers.

        The record is of a report that a continuing run has outlived, see ``Runs``.
        """
        if stored.config_generation > ours.config_generation or _order(stored) <= _order(ours):
            return False
        key = (ours.node, ours.vendor)
        if self._outlived.get(key) == _order(stored):
            return True
        return not self._stored_runs.is_older(key, _order(ours), _order(stored))

    def configure(self, config: DeviceConfig) -> bool:
        """Apply ``config``; returns whether anything changed (then the generation grew)."""
        if config == self._config:
            return False
        self._config = config
        self.generation += 1
        return True

    def stranded_by(self, config: DeviceConfig, holdings: Mapping[str, Holding]) -> list[Stranded]:
        """Return devices that ``config`` would make too small for the pods that use them now."""
        return stranded(self._devices_under(self._config), self._devices_under(config), holdings)

    def _devices_under(self, config: DeviceConfig) -> dict[str, list[Device]]:
        """Return the reported devices under a configuration, by node."""
        by_node: dict[str, list[Device]] = {}
        for (node, _), report in self._reports.items():
            devices, _ = canonical_devices(
                config, node, report.devices, host_memory_mib=report.host_memory_mib
            )
            by_node.setdefault(node, []).extend(devices)
        return by_node

    @property
    def config(self) -> DeviceConfig:
        """The configuration in use."""
        return self._config

    def cordon(self, node: str, uuids: frozenset[str]) -> bool:
        """Set the devices of ``node`` that its operator cordoned; returns whether that changed."""
        if self._cordons.get(node, frozenset()) == uuids:
            return False
        self._cordons[node] = uuids
        return True

    def cordoned_nodes(self) -> list[str]:
        """Return the nodes with a device that the operator cordoned, sorted."""
        return sorted(node for node, uuids in self._cordons.items() if uuids)

    def keys(self) -> list[tuple[str, str]]:
        """Return every (node, vendor) with a report, sorted."""
        return sorted(self._reports)

    def keys_of(self, node: str) -> list[tuple[str, str]]:
        """Return every (node, vendor) of one node, sorted."""
        return sorted(key for key in self._reports if key[0] == node)

    def canonical(self, node: str, vendor: str, *, time_s: float) -> NodeDevices:
        """Return the devices to publish for (node, vendor); ``KeyError`` without a report."""
        report = self._reports[(node, vendor)]
        usable: dict[str, DeviceFacts] = {}
        for facts in report.devices[:MAX_DEVICES_PER_NODE]:
            if not _problem_of(facts, report, set(usable)):
                usable[facts.uuid] = facts
        found, shortage = canonical_devices(
            self._config,
            node,
            usable.values(),
            host_memory_mib=report.host_memory_mib,
            cordoned_uuids=self._cordons.get(node, frozenset()),
        )
        devices = {device.uuid: device for device in found}
        problems = [one for one in (report.problem, shortage) if one]
        problems.extend(problems_of(report))
        return NodeDevices(
            node=node,
            vendor=vendor,
            boot_id=report.boot_id,
            seq=report.seq,
            time_s=time_s,
            config_generation=self.generation,
            devices=tuple(devices.values()),
            links=tuple(link for link in report.links if link.a in devices and link.b in devices),
            driver_version=report.driver_version,
            problem=_shortened("; ".join(problems)),
        )


def _order(message: NodeReport | NodeDevices) -> _Order:
    return message.boot_id, message.seq


def _shortened(text: str) -> str:
    return text if len(text) <= _PROBLEM_MOST else f"{text[:_PROBLEM_MOST]}…"


def supersedes(ours: NodeDevices, stored: NodeDevices | None) -> bool:
    """Return whether ``ours`` is to be published over ``stored``.

    False when it contains no change, and when another replica had newer input: a newer report, or a
    configuration that we have not read yet.
    """
    if stored is None:
        return True
    if _order(stored) > _order(ours):
        return False
    if stored.config_generation > ours.config_generation:
        return False
    return not same_content(ours, stored)


def operator_cordons(config: DeviceConfig, stored: NodeDevices) -> frozenset[str]:
    """Return devices of a stored record that the operator cordoned, not the configuration."""
    return frozenset(
        device.uuid
        for device in stored.devices
        if device.cordoned
        and not use_of(
            config,
            stored.node,
            DeviceFacts(
                uuid=device.uuid,
                vendor=device.vendor,
                index=device.index,
                type=device.type,
                memory_mib=device.memory_mib,
            ),
        ).cordoned
    )


def same_content(a: NodeDevices, b: NodeDevices | None) -> bool:
    """Return whether ``a`` and ``b`` have the same content, except time and order."""
    if b is None:
        return False
    return _content(a) == _content(b)


def _content(devices: NodeDevices) -> Mapping[str, object]:
    skipped = {"time_s", "config_generation"}
    return {f: getattr(devices, f) for f in NodeDevices.__struct_fields__ if f not in skipped}
