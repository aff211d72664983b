# SPDX-License-Identifier: Apache-2.0
"""``hamictl import-config``: converts the configuration of a HAMi installation.

Each input is a plain file or the ConfigMap that contains it (``kubectl get configmap … -o yaml``).
The output is a kustomize component: complete settings of the four services, the device
configuration, and patches of the other objects. ``hamiconfig`` converts, ``hamicomponent`` builds.
"""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import tomli_w

from hami_common import documents
from hami_common.errors import SettingsInvalid
from hamictl import hamicomponent, options, output
from hamictl.errors import InputRefused
from hamictl.hamiconfig import SERVICES, ConfigInvalid, Imported, import_hami

DEVICE_CONFIG_KEY, NODE_CONFIG_KEY = "device-config.yaml", "config.json"


_file = click.Path(path_type=Path, dir_okay=False)
_folder = click.Path(path_type=Path, file_okay=False)


@click.command()
@click.option("--device-config", type=_file, help="HAMi's device-config.yaml, or its ConfigMap.")
@click.option(
    "--node-config", type=_file, help="HAMi's node configuration config.json, or its ConfigMap."
)
@click.option("--values", type=_file, help="values.yaml of HAMi's Helm chart.")
@click.option(
    "--accept",
    multiple=True,
    metavar="KEY",
    help="Import without this key, which is refused; may be repeated.",
)
@click.option(
    "--base",
    type=_folder,
    default=Path("deploy/kustomize/base/config"),
    show_default=True,
    help="Base settings that the imported ones override.",
)
@click.option(
    "--overlay",
    "overlays",
    type=_folder,
    multiple=True,
    help="Directory of settings that an overlay has in place of the base's; may be repeated.",
)
@click.option(
    "--out", type=_folder, help="New directory for the component; without it, print the settings."
)
@options.format_option
def import_config(
    *,
    device_config: Path | None,
    node_config: Path | None,
    values: Path | None,
    accept: tuple[str, ...],
    base: Path,
    overlays: tuple[Path, ...],
    out: Path | None,
    format_: str,
) -> None:
    """Convert HAMi 2.10 configuration to a kustomize component."""
    if device_config is None and node_config is None and values is None:
        raise InputRefused("nothing to import: give --device-config, --node-config or --values")
    imported = read_hami(
        device_config=device_config, node_config=node_config, values=values, accepted=accept
    )
    written = (
        () if out is None else write_component(imported, base=base, overlays=overlays, out=out)
    )
    if output.structured(imported, format_):
        return
    _print_notes(imported, is_wide=format_ == "wide")
    if out is None:
        trees = {**imported.settings, "devices": imported.devices}
        for name, tree in trees.items():
            if tree:
                click.echo(f"\n# {name}.toml\n{tomli_w.dumps(tree)}", nl=False)
    for path in written:
        click.echo(f"written {path}")


def _print_notes(imported: Imported, *, is_wide: bool) -> None:
    """Print all notes if wide, else those that need attention and a count of the others."""
    shown = [
        note
        for note in imported.notes
        if is_wide or (note.result != "carried" and not note.is_default)
    ]
    rows: list[list[str]] = []
    if is_wide:
        rows = [[note.result, note.key, note.text] for note in shown]
    else:
        groups: dict[tuple[str, str], list[str]] = {}
        for note in shown:
            groups.setdefault((note.result, note.text), []).append(note.key)
        rows = [
            [result, keys[0] if len(keys) == 1 else f"{keys[0]} and {len(keys) - 1} more", text]
            for (result, text), keys in groups.items()
        ]
    output.table(["RESULT", "KEY", "NOTE"], rows, empty="")
    counts = Counter(note.result for note in imported.notes)
    parts = [f"{counts[one]} {one}" for one in ("carried", "refused", "no effect") if counts[one]]
    more = "" if is_wide else "; -o wide lists every key"
    click.echo(f"keys: {', '.join(parts) or 'none'}{more}")


def read_hami(
    *,
    device_config: Path | None,
    node_config: Path | None,
    values: Path | None,
    accepted: tuple[str, ...] = (),
) -> Imported:
    """Convert the given files; ``InputRefused`` names the file and key."""
    chart = None if values is None else _document(values)
    inner = inner_documents(chart or {})
    given = {
        "device_config": None if device_config is None else _document(device_config),
        "node_config": None if node_config is None else _document(node_config),
    }
    texts = {
        name: given[name] or _parsed(str(text), f"values: {name}")
        for name, text in inner.items()
        if given[name] or text
    }
    try:
        return import_hami(values=chart, accepted=accepted, **texts)
    except ConfigInvalid as error:
        raise InputRefused(str(error)) from error


def inner_documents(chart: dict[str, Any]) -> dict[str, str | None]:
    """Return the texts of the documents in the chart's values.

    HAMi ignores the node configuration there if the values name a ConfigMap in its place.
    """
    nodes = _inner(_inner(chart, "devicePlugin"), "nodeConfiguration")
    is_elsewhere = bool(_inner(nodes, "externalConfigName"))
    return {
        "device_config": _inner(_inner(chart, "device-config"), "content"),
        "node_config": None if is_elsewhere else _inner(nodes, "config"),
    }


def write_component(
    imported: Imported, *, base: Path, out: Path, overlays: Sequence[Path] = ()
) -> tuple[Path, ...]:
    """Write the component and return its files.

    ``base`` is ``deploy/kustomize/base/config``. The component replaces whole files, so files of
    ``overlays`` replace those of the base before. ``out`` must be empty or absent.
    """
    if out.exists() and any(out.iterdir()):
        raise InputRefused(f"{out} is not empty; name a new directory")
    kube_scheduler, command = _kube_scheduler(base.parent)
    components = os.path.relpath(base.parent.parent / "components", out)
    below = hamicomponent.Base(
        settings={
            name: _toml(_last((base, *overlays), f"{name}.toml")) for name in (*SERVICES, "devices")
        },
        kube_scheduler=kube_scheduler,
        command=command,
        components=components,
    )
    written = []
    for name, text in hamicomponent.files(imported, below).items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return tuple(written)


def _last(directories: Sequence[Path], name: str) -> Path:
    """Return the file in the last directory that has one, else where the first should have it."""
    found = [path for one in directories if (path := one / name).exists()]
    return found[-1] if found else directories[0] / name


def _kube_scheduler(directory: Path) -> tuple[dict[str, Any], list[str]]:
    """Return kube-scheduler's configuration and command in the base."""
    path = directory / "scheduler.yaml"
    try:
        configuration = _parsed(
            (directory / "kube-scheduler.yaml").read_text(encoding="utf-8"), "kube-scheduler.yaml"
        )
        objects = documents.yaml_all(path.read_text(encoding="utf-8"), field=str(path))
    except OSError as error:
        raise InputRefused(
            f"{error.filename}: {error.strerror}; give the directory of "
            "deploy/kustomize/base/config"
        ) from error
    except SettingsInvalid as error:
        raise InputRefused(f"{error.field}: {error.problem}; {error.fix}") from error
    for one in objects:
        if isinstance(one, dict) and one.get("kind") == "Deployment":
            for container in one["spec"]["template"]["spec"]["containers"]:
                if container["name"] == "kube-scheduler":
                    return configuration, container["command"]
    raise InputRefused(f"{path}: no Deployment with a container kube-scheduler")


def _toml(path: Path) -> dict[str, Any]:
    try:
        return documents.toml(path.read_bytes(), field=str(path))
    except OSError as error:
        raise InputRefused(
            f"{path}: {error.strerror}; give the directory of deploy/kustomize/base/config"
        ) from error
    except SettingsInvalid as error:
        raise InputRefused(f"{error.field}: {error.problem}; {error.fix}") from error


def _inner(tree: object, key: str) -> Any:  # noqa: ANN401 - any value of the chart
    return tree.get(key) if isinstance(tree, dict) else None


def _document(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputRefused(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    tree = _parsed(text, str(path))
    if tree.get("kind") == "ConfigMap":
        data = tree.get("data") or {}
        found = [key for key in (DEVICE_CONFIG_KEY, NODE_CONFIG_KEY) if key in data]
        if len(found) != 1:
            raise InputRefused(
                f"{path}: a ConfigMap without {DEVICE_CONFIG_KEY} or {NODE_CONFIG_KEY}; "
                "it is not of HAMi"
            )
        return _parsed(str(data[found[0]]), f"{path}: {found[0]}")
    return tree


def _parsed(text: str, name: str) -> dict[str, Any]:
    """Parse YAML or JSON."""
    try:
        tree = documents.yaml_one(text, field=name)
    except SettingsInvalid as error:
        raise InputRefused(f"{name}: {error.problem}; {error.fix}") from error
    if not isinstance(tree, dict):
        raise InputRefused(f"{name}: not a mapping at its top")
    return tree
