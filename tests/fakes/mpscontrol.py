# SPDX-License-Identifier: Apache-2.0
"""A scripted ``nvidia-cuda-mps-control``: control daemon of a Multi-Process Service without GPU.

``-f`` runs the daemon, anything else sends the commands of standard input to it, as the real
program does. The directory above ``CUDA_MPS_PIPE_DIRECTORY`` has the script and the record:

    state.json   servers {PID: [PIDs of clients]}, mute (answers nothing), refuses (options with
                 which the daemon ends at once); read at each command
    commands     one line per command, and ``start OPTIONS`` per start

``make_control`` and ``make_canary`` write programs for ``MpsService``.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

MUTE_S = 60.0


class FakeMps:
    """The service of one device, as tests script it and see it."""

    def __init__(self, directory: Path, uuid: str) -> None:
        self._place = directory / uuid
        self._place.mkdir(parents=True, exist_ok=True)

    def script(self, **state: object) -> None:
        """Set the state, whole and at once."""
        fresh = self._place / "state.new"
        fresh.write_text(json.dumps(state))
        fresh.replace(self._place / "state.json")

    def clients(self) -> dict[str, list[int]]:
        """The clients that are connected."""
        found: dict[str, list[int]] = _state(self._place).get("servers", {})
        return found

    def commands(self, prefix: str = "") -> list[str]:
        """The commands that the daemons were given, oldest first."""
        try:
            lines = (self._place / "commands").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [line for line in lines if line.startswith(prefix)]

    def pid(self) -> int:
        """PID of the newest daemon."""
        return int((self._place / "pid").read_text())


def make_control(directory: Path) -> str:
    """Write the program, and return its path."""
    return _program(directory / "nvidia-cuda-mps-control", f"exec {sys.executable} {__file__} run")


def make_canary(directory: Path) -> str:
    """Write a client that hangs while the state says ``wedged``."""
    return _program(directory / "canary", f"exec {sys.executable} {__file__} canary")


def _program(path: Path, line: str) -> str:
    path.write_text(f'#!/bin/sh\n{line} "$@"\n')
    path.chmod(0o755)
    return str(path)


def _state(place: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((place / "state.json").read_text())
    except FileNotFoundError:
        return {}
    return found


def _note(place: Path, line: str) -> None:
    with (place / "commands").open("a") as file:
        file.write(f"{line}\n")


def _serve(place: Path, options: list[str]) -> int:
    _note(place, " ".join(["start", *options]))
    if set(options) & set(_state(place).get("refuses", [])):
        return 1
    os.chdir(place / "pipe")  # a socket's path is short
    path = Path("control")
    path.unlink(missing_ok=True)
    (place / "pid").write_text(str(os.getpid()))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        while True:
            peer, _ = listener.accept()
            with peer:
                command = peer.recv(4096).decode().strip()
                _note(place, command)
                if _state(place).get("mute"):
                    time.sleep(MUTE_S)
                peer.sendall(_answer(place, command.split()).encode())
            if command.startswith("quit"):
                path.unlink(missing_ok=True)
                return 0


def _answer(place: Path, words: list[str]) -> str:
    state = _state(place)
    servers = state.get("servers", {})
    match words:
        case ["get_default_active_thread_percentage"]:
            return "100.0\n"
        case ["get_server_list"]:
            return "".join(f"{server}\n" for server in servers)
        case ["get_client_list", server]:
            return "".join(f"{client}\n" for client in servers[server])
        case ["terminate_client", server, client]:
            servers[server].remove(int(client))
            FakeMps(place.parent, place.name).script(**state)
            return ""
        case _:
            return ""


def _send(place: Path) -> int:
    with socket.socket(socket.AF_UNIX) as peer:
        try:
            os.chdir(place / "pipe")
            peer.connect("control")
        except OSError:
            sys.stderr.write("Cannot find MPS control daemon process\n")
            return 1
        peer.sendall(sys.stdin.read().encode())
        sys.stdout.write(peer.recv(1 << 16).decode())
    return 0


def main(words: list[str]) -> int:
    """Run as the daemon, as its command line, or as a client."""
    place = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]).parent
    if words[0] == "canary":
        if _state(place).get("wedged"):
            time.sleep(MUTE_S)
        return 0
    return _serve(place, words[1:]) if "-f" in words else _send(place)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
