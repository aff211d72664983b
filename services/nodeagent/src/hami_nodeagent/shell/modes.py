# SPDX-License-Identifier: Apache-2.0
"""Switches cards into the MIG mode that the operator's setting names, each while it is unused.

``core.modes`` decides; this module reads the cards, stores the journal, switches the mode and
updates the agent's state. Without the setting and without a journal of an earlier run, no card is
read. A failed switch is retried with growing pauses; after ``partitions.tries`` attempts, or at
once if only a reboot or a permission would help, the card serves pods in its present mode, and the
switch is tried again after ``partitions.mode_again_s``. Times in seconds.
"""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio.to_thread

from hami_common.model.device import DeviceFacts
from hami_nodeagent.core.board import ModeNotice, ModeReported
from hami_nodeagent.core.hardware import CardMode
from hami_nodeagent.core.modes import (
    FILE_VERSION,
    Look,
    ModeNote,
    ModesFile,
    Verdict,
    decide,
    is_held_back,
    users_of,
    wanted_of,
)
from hami_nodeagent.drivers.errors import DriverDenied, DriverError, NotSupported
from hami_nodeagent.drivers.protocol import ModeSwitch
from hami_nodeagent.shell.hostcheck import CDI_DIRECTORIES, cdi_texts, host_root
from hami_nodeagent.shell.site import Site

_log = logging.getLogger(__name__)


@dataclass
class _Known:
    """State of one card between two passes."""

    cordoned_at_s: float | None = None
    attempts: int = 0
    not_before_s: float = 0.0
    problem: str = ""


class ModeKeeper:
    """Modes of one vendor's cards on this node."""

    def __init__(self, *, site: Site, switch: ModeSwitch, look_again: Callable[[], None]) -> None:
        """``look_again`` lets the agent discover the vendor's devices at once."""
        self._site = site
        self._switch = switch
        self._look_again = look_again
        self._setting = site.settings.drivers.nvidia.mig_mode
        self._settings = site.settings.partitions
        self._picture = site.picture
        self._board = site.picture.partitions
        self._clock = site.clock
        self._known: dict[str, _Known] = {}
        self._named: str | None = None
        """Content of the host's CDI specifications, as last read."""
        file = site.checkpoint.load_modes()
        self._notes = {note.uuid: note for note in (file.notes if file is not None else ())}

    async def run(self) -> None:
        """Compare modes periodically while the setting or a journal may require a switch."""
        while self._setting or self._notes:
            await self._site.quarantine.run("card", "look", self.look, is_retried=False)
            await self._clock.sleep(self._settings.mode_look_s)

    async def look(self) -> None:
        """Read all cards, and bring each one step on."""
        try:
            modes = await self._switch.modes()
            cards = {facts.uuid: facts for facts in await self._switch.listed()}
        except DriverError as error:
            _log.debug("modes of cards not read", extra={"problem": str(error)})
            return
        wanted = {
            mode.uuid: self._wanted_of(cards[mode.uuid]) for mode in modes if mode.uuid in cards
        }
        if self._site.settings.injection == "cdi" and False in wanted.values():
            self._named = await anyio.to_thread.run_sync(self._read_names)
        for mode in modes:
            if mode.uuid in wanted and self._site.quarantine.is_due("card", mode.uuid):
                attempt = partial(self._bring_on, mode, wanted[mode.uuid])
                await self._site.quarantine.run("card", mode.uuid, attempt, is_retried=False)

    def _wanted_of(self, card: DeviceFacts) -> bool | None:
        word = wanted_of(self._setting, self._site.node, card)
        return None if word is None else word == "on"

    def _read_names(self) -> str | None:
        """All CDI specifications of NVIDIA's cards; ``None`` where the host's are not seen."""
        settings = self._site.settings
        root = host_root(settings)
        folders = [root / place for place in CDI_DIRECTORIES]
        if not any(folder.is_dir() for folder in folders):
            return None
        folders.append(Path(self._settings.cdi_dir))
        kind = settings.vendors.nvidia.cdi_kind
        return "\n".join(
            text for folder in folders for own, text in cdi_texts(folder) if own == kind
        )

    def _is_named(self, uuid: str) -> bool:
        if self._site.settings.injection != "cdi" or self._named is None:
            return True
        return re.search(rf"""name["']?\s*:\s*["']?{re.escape(uuid)}\b""", self._named) is not None

    async def _bring_on(self, mode: CardMode, wanted: bool | None) -> None:  # noqa: FBT001 - as in Look
        known = self._known.setdefault(mode.uuid, _Known())
        verdict = decide(self._look_at(mode, wanted, known))
        self._tell(mode, verdict)
        if not await self._store(mode.uuid, verdict.note):
            return
        if verdict.step is not None:
            if decide(self._look_at(mode, wanted, known)).step != verdict.step:
                return  # a pod got a part of the card while the journal was stored
            await self._take(mode, known, is_divided=verdict.step)
        elif not verdict.text:
            known.attempts, known.not_before_s = 0, 0.0

    def _look_at(self, mode: CardMode, wanted: bool | None, known: _Known) -> Look:  # noqa: FBT001 - as in Look
        now_s = self._clock.monotonic_s()
        picture, board = self._picture, self._board
        is_told = mode.uuid in board.switching and board.switching[mode.uuid].is_withheld
        vendor = self._switch.vendor
        is_held = vendor in picture.canonical_by_vendor and is_held_back(
            mode, picture.view.devices_by_uuid
        )
        if not (is_told and is_held):
            known.cordoned_at_s = None
        elif known.cordoned_at_s is None:
            known.cordoned_at_s = now_s
        is_over = known.attempts >= self._settings.tries
        is_paused = known.not_before_s > now_s
        return Look(
            mode=mode,
            wanted=wanted,
            note=self._notes.get(mode.uuid),
            users=users_of(
                mode,
                entries=picture.entries_by_uid,
                grants=picture.grants,
                pods=picture.pods,
                instances=[
                    *(one for one in board.carried.values() if one.uuid == mode.uuid),
                    *board.foreign_by_uuid.get(mode.uuid, ()),
                ],
            ),
            is_known=picture.ledger_known and picture.pods_known,
            cordoned_for_s=-1.0 if known.cordoned_at_s is None else now_s - known.cordoned_at_s,
            settle_s=self._settings.mode_settle_s,
            is_named=self._is_named(mode.uuid),
            problem=known.problem,
            pause="none" if not is_paused else "later" if is_over else "soon",
        )

    def _tell(self, mode: CardMode, verdict: Verdict) -> None:
        """Let the report, and with it registry and scheduler, know."""
        notice = None
        if verdict.text:
            notice = ModeNotice(text=verdict.text, is_withheld=verdict.is_withheld)
        if self._board.switching.get(mode.uuid) == notice:
            return
        self._board.apply(ModeReported(uuid=mode.uuid, notice=notice))
        _log.info(
            "mode of a card", extra={"device": mode.uuid, "text": verdict.text or "as wanted"}
        )
        self._picture.note_change()
        self._look_again()

    async def _store(self, uuid: str, note: ModeNote | None) -> bool:
        """The journal as decided, on disk; false when that is not possible."""
        if self._notes.get(uuid) == note:
            return True
        notes = {key: one for key, one in self._notes.items() if key != uuid}
        if note is not None:
            notes[uuid] = note
        file = ModesFile(version=FILE_VERSION, notes=tuple(notes.values()))
        try:
            await anyio.to_thread.run_sync(self._site.checkpoint.save_modes, file)
        except OSError as error:
            self._site.metrics.checkpoint_failures.inc()
            _log.error(
                "journal of modes not stored, cards are left alone",
                extra={"device": uuid, "problem": str(error)},
            )
            return False
        self._notes = notes
        return True

    async def _take(self, mode: CardMode, known: _Known, *, is_divided: bool) -> None:
        doing = {"device": mode.uuid, "is_divided": is_divided}
        try:
            await self._switch.switch_mode(mode.uuid, is_divided=is_divided)
        except DriverError as error:
            known.problem = str(error)
            pause_s = min(self._settings.retry_s * 2**known.attempts, self._settings.retry_most_s)
            known.attempts += 1
            if isinstance(error, DriverDenied | NotSupported):
                known.attempts = max(known.attempts, self._settings.tries)
            if known.attempts >= self._settings.tries:
                pause_s = self._settings.mode_again_s
            known.not_before_s = self._clock.monotonic_s() + pause_s
            extra = {**doing, "problem": known.problem, "attempt": known.attempts}
            _log.warning("mode of a card not switched", extra=extra)
        else:
            known.attempts, known.not_before_s = 0, 0.0
            _log.warning("mode of a card switched", extra=doing)
        self._site.metrics.mode_switches.labels(
            vendor=self._switch.vendor,
            to="on" if is_divided else "off",
            result="failed" if known.attempts else "switched",
        ).inc()
        self._look_again()
