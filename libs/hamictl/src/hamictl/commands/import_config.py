# SPDX-License-Identifier: Apache-2.0
"""``hamictl import-config``: converts the configuration of a HAMi installation.

Each input is a plain file or the ConfigMap that contains it (``kubectl get configmap … -o yaml``).
The output is a kustomize component with the complete settings of the four services and the device
configuration; an overlay that lists it replaces the base's. The conversion is ``hamiconfig``.
"""

from pathlib import Path
from typing import Any

import click
import tomli_w
import yaml

from hami_common import documents, namespaces
from hami_common.errors import SettingsInvalid
from hamictl import output
from hamictl.errors import InputRefused
from hamictl.hamiconfig import SERVICES, ConfigInvalid, Imported, import_hami

DEVICE_CONFIG_KEY, NODE_CONFIG_KEY = "device-config.yaml", "config.json"
_HEAD = """# SPDX-License-Identifier: Apache-2.0
# Generated from the configuration of HAMi by hamictl import-config.
"""


_file = click.Path(path_type=Path, dir_okay=False)
_folder = click.Path(path_type=Path, file_okay=False)


@click.command()
@click.option("--device-config", type=_file, help="HAMi's device-config.yaml, or its ConfigMap.")
@click.option(
    "--node-config", type=_file, help="HAMi's node configuration config.json, or its ConfigMap."
)
@click.option("--values", type=_file, help="values.yaml of HAMi's Helm chart.")
@click.option(
    "--base",
    type=_folder,
    default=Path("deploy/kustomize/base/config"),
    show_default=True,
    help="Base settings that the imported ones override.",
)
@click.option(
    "--out", type=_folder, help="New directory for the component; without it, print the settings."
)
def import_config(
    *,
    device_config: Path | None,
    node_config: Path | None,
    values: Path | None,
    base: Path,
    out: Path | None,
) -> None:
    """Convert HAMi 2.10 configuration to a kustomize component."""
    if device_config is None and node_config is None and values is None:
        raise InputRefused("nothing to import: give --device-config, --node-config or --values")
    imported = read_hami(device_config=device_config, node_config=node_config, values=values)
    rows = [[note.weight, note.key, note.text] for note in imported.notes]
    output.table(["", "KEY", "NOTE"], rows, empty="All settings were imported.")
    if out is None:
        trees = {**imported.settings, "devices": imported.devices}
        for name, tree in trees.items():
            if tree:
                click.echo(f"\n# {name}.toml\n{tomli_w.dumps(tree)}", nl=False)
        return
    for path in write_component(imported, base=base, out=out):
        click.echo(f"written {path}")


def read_hami(
    *, device_config: Path | None, node_config: Path | None, values: Path | None
) -> Imported:
    """Convert the given files; ``InputRefused`` names the file and key."""
    chart = None if values is None else _document(values)
    plugin = (chart or {}).get("devicePlugin")
    own = (chart or {}).get("device-config")
    inner = {
        "device_config": _inner(own, "content"),
        "node_config": _inner(_inner(plugin, "nodeConfiguration"), "config"),
    }
    given = {
        "device_config": None if device_config is None else _document(device_config),
        "node_config": None if node_config is None else _document(node_config),
    }
    texts = {
        name: given[name] or _parsed(text, f"values: {name}")
        for name, text in inner.items()
        if given[name] or text
    }
    try:
        return import_hami(values=chart, **texts)
    except ConfigInvalid as error:
        raise InputRefused(str(error)) from error


def write_component(imported: Imported, *, base: Path, out: Path) -> tuple[Path, ...]:
    """Write a kustomize component with ``base``'s settings and the imported ones merged.

    ``base`` is ``deploy/kustomize/base/config``. ``out`` must be empty or absent.
    """
    if out.exists() and any(out.iterdir()):
        raise InputRefused(f"{out} is not empty; name a new directory")
    config = out / "config"
    config.mkdir(parents=True)
    written = []
    for service in SERVICES:
        tree = _over(_toml(base / f"{service}.toml"), imported.settings[service])
        written.append(_write(config / f"{service}.toml", tree))
    devices = _over(_toml(base / "devices.toml"), imported.devices)
    written.append(_write(config / "devices.toml", devices))
    kustomization = out / "kustomization.yaml"
    kustomization.write_text(_HEAD + _kustomization(), encoding="utf-8")
    return (*written, kustomization)


def _kustomization() -> str:
    generators = [
        {
            "name": f"hami-{service}-config",
            "namespace": namespaces.AGENTS if service == "nodeagent" else namespaces.SYSTEM,
            "behavior": "merge",
            "files": [
                f"config/{service}.toml",
                *(["config/devices.toml"] if service == "registry" else []),
            ],
        }
        for service in SERVICES
    ]
    document = {
        "apiVersion": "kustomize.config.k8s.io/v1alpha1",
        "kind": "Component",
        "configMapGenerator": generators,
    }
    return yaml.safe_dump(document, sort_keys=False)


def _write(path: Path, tree: dict[str, Any]) -> Path:
    path.write_text(_HEAD + tomli_w.dumps(tree), encoding="utf-8")
    return path


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge two trees; values of ``above`` win."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = (
            _over(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
        )
    return merged


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
