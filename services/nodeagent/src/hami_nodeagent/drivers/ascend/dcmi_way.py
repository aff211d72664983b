# SPDX-License-Identifier: Apache-2.0
"""Ascend chips through DCMI, the vendor's C library, in a process of its own (``binding``).

One run reads all properties of all chips. The library has no call that lists templates: the list
comes from npu-smi where it is installed and is cached; otherwise the vendor's published table is
used.
"""

from collections.abc import Awaitable, Callable

from hami_common.model.device import Profile
from hami_nodeagent.drivers.ascend import parse_dcmi as parse
from hami_nodeagent.drivers.ascend.parse import ChipKey
from hami_nodeagent.drivers.ascend.way import SOFT_FAILURES, ChipSight, Glance, Look, place_of
from hami_nodeagent.drivers.errors import DriverError, HardwareAbsent, ToolMismatch
from hami_nodeagent.drivers.library import LibraryProgram


class DcmiWay:
    """The way through the library."""

    def __init__(
        self,
        library: LibraryProgram,
        templates: Callable[[], Awaitable[tuple[Profile, ...]]],
        *,
        watch: LibraryProgram,
    ) -> None:
        """``watch``: a second runner of the library, so that a wait does not block other calls.

        ``templates``: runs npu-smi; its errors mean that no such list exists.
        """
        self._library = library
        self._watch = watch
        self._listed = templates
        self._templates: tuple[Profile, ...] | None = None

    def forget(self) -> None:
        """Another driver may have other templates."""
        self._templates = None

    async def glance(self) -> Glance:
        """Health and use of all chips."""
        sight = await self._sight("glance")
        return Glance(
            chips=tuple(one.chip for one in sight.chips),
            version=sight.version,
            bandwidth_pct={one.chip.key: one.bandwidth_pct for one in sight.chips},
            problems=sight.problems,
        )

    async def look(self, *, strict: bool) -> Look:
        """One run for everything."""
        sight = await self._sight("look" if strict else "survey")
        problems, sights = list(sight.problems), []
        for one in sight.chips:
            if not one.is_compatible:
                detail = f"chip {place_of(one.chip.key)}: driver and firmware do not fit"
                raise ToolMismatch(doing="dcmi_get_device_compatibility", detail=detail)
            if strict and one.trouble is not None:
                raise one.trouble
            if one.logic is None:
                problems.append(f"chip {place_of(one.chip.key)} has no logic id")
                continue
            physical = one.chip.physical
            sights.append(
                ChipSight(
                    chip=one.chip,
                    logic=one.logic,
                    physical=one.logic if physical is None else physical,
                    die=one.die,
                    name=one.chip.name,
                    division=one.division,
                    templates=await self._templates_of(one) if one.division else (),
                    is_shared=one.is_shared,
                    attributes=one.super_pod,
                )
            )
        return Look(
            chips=tuple(sights),
            version=sight.version,
            problems=tuple(problems),
            views=sight.views,
        )

    async def _templates_of(self, chip: parse.DcmiChip) -> tuple[Profile, ...]:
        if self._templates is None:
            try:
                self._templates = await self._listed()
            except DriverError:
                self._templates = ()
        return self._templates or parse.templates_of(chip)

    async def wait(self, limit_s: float) -> frozenset[parse.Fault]:
        """Wait for faults with ``dcmi_subscribe_fault_event``, in a run of its own."""
        return await self._watch.ask(parse.faults, "wait", f"{limit_s:g}")

    async def create(self, key: ChipKey, template: str, number: str) -> None:
        """``dcmi_create_vdevice``."""
        await self._library.run("create", *map(str, key), template, number)

    async def destroy(self, key: ChipKey, number: str) -> None:
        """``dcmi_set_destroy_vdevice``."""
        await self._library.run("destroy", *map(str, key), number)

    async def keep(self) -> None:
        """``dcmi_set_vnpu_config_recover_mode``."""
        await self._library.run("keep")

    async def share(self, key: ChipKey) -> bool:
        """``dcmi_set_device_share_enable``; a reboot of the host undoes it."""
        try:
            await self._library.run("share", *map(str, key), "1")
        except SOFT_FAILURES:
            return False
        return True

    async def _sight(self, word: str) -> parse.DcmiSight:
        sight = await self._library.ask(parse.sight, word)
        if not sight.chips and not sight.problems:
            doing = f"{self._library.name} {word}"
            raise HardwareAbsent(doing=doing, detail="the library lists no chip")
        return sight
