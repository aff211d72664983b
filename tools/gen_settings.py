# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/settings.md from the settings' Structs; ``--check`` only compares.

Everything between the markers ``generated: settings`` and ``end of generated part`` belongs to this
program: the settings that all services share, those of each service, the vendors' section, the
device configuration, the queues file and the catalog of SKUs. The effect of a change in the file
comes from ``HOT``. A setting without text is shown without one.
"""

import sys
import typing
from collections.abc import Iterator

import msgspec
from msgspec import Struct

import hami_nodeagent.settings
import hami_registry.settings
import hami_scheduler.settings
import hami_webhook.settings
from hami_common.runtime.settings import ServiceSettings
from hami_common.skus.catalog import AlternativeConfig, Sku, SkuFile
from hami_common.vendors.catalog import VendorSettings
from hami_core.quota.queues import QueueConfig
from hami_registry.core.device_config import Defaults as DeviceDefaults
from hami_registry.core.device_config import DeviceConfig, Rule
from tools.gen_wire import field_texts, type_text
from tools.generated import DOCS, write_parts

SERVICES: tuple[tuple[str, str, type[ServiceSettings]], ...] = (
    ("webhook", "hami_webhook", hami_webhook.settings.Settings),
    ("scheduler", "hami_scheduler", hami_scheduler.settings.Settings),
    ("registry", "hami_registry", hami_registry.settings.Settings),
    ("nodeagent", "hami_nodeagent", hami_nodeagent.settings.Settings),
)
VENDORS = (
    "Sections `[vendors.<vendor>]`, the same in every service. A change needs a restart of all of"
    " them, and a webhook configuration that names the same resources ([install](install.md))."
)
DEVICES = (
    "The file that `device_config_file` of the registry names, with what it means in"
    " [wire.md](wire.md#device-configuration). A change takes effect at once."
)
QUEUES = (
    "`[[queue]]` of the file that `queues_file` of the scheduler names, with what it means in"
    " [quota.md](quota.md#queues). A change takes effect at once."
)
SKUS = (
    "The file that `skus_file` of webhook and registry names, with what it means in"
    " [skus.md](skus.md#the-catalog). A change takes effect at once."
)
HEAD = "| setting | type | default | a change takes effect | |\n| --- | --- | --- | --- | --- |"
PLAIN_HEAD = "| key | type | default | |\n| --- | --- | --- | --- |"


class Row(typing.NamedTuple):
    """One setting."""

    path: str
    kind: str
    default: str
    text: str


def rows(
    struct: type[Struct], *, path: str = "", without: frozenset[str] = frozenset()
) -> Iterator[Row]:
    """Return every setting of ``struct``, those of nested Structs with their full paths."""
    texts: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        if issubclass(base, Struct) and base is not Struct:
            texts |= field_texts(base)
    hints = typing.get_type_hints(struct)
    for field in msgspec.structs.fields(struct):
        if field.name in without:
            continue
        full = f"{path}{field.encode_name}"
        hint = hints[field.name]
        if isinstance(hint, type) and issubclass(hint, Struct):
            yield from rows(hint, path=f"{full}.")
        else:
            text = texts.get(field.name, "").replace("|", "\\|").replace("``", "`")
            yield Row(full, type_text(hint), _default(field), text)


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    made = field.default_factory is not msgspec.NODEFAULT
    value = field.default_factory() if made else field.default
    text = msgspec.json.encode(value).decode()
    return "a table of the vendor's chips" if text.startswith("[{") else f"`{text}`"


def is_hot(path: str, hot: frozenset[str]) -> bool:
    """Return True when ``path`` or a setting that contains it is hot."""
    parts = path.split(".")
    return any(".".join(parts[: end + 1]) in hot for end in range(len(parts)))


def service_table(struct: type[ServiceSettings], *, without: frozenset[str]) -> str:
    """Settings of a service."""
    lines = [HEAD]
    for row in rows(struct, without=without | {"vendors"}):
        when = "at once" if is_hot(row.path, struct.HOT) else "restart"
        lines.append(f"| `{row.path}` | {row.kind} | {row.default} | {when} | {row.text} |")
    return "\n".join(lines)


def plain_table(struct: type[Struct], *, without: frozenset[str] = frozenset()) -> str:
    """Keys of another file."""
    lines = [PLAIN_HEAD]
    lines += [
        f"| `{row.path}` | {row.kind} | {row.default} | {row.text} |"
        for row in rows(struct, without=without)
    ]
    return "\n".join(lines)


def tables() -> str:
    """The whole generated part."""
    shared = frozenset(field.name for field in msgspec.structs.fields(ServiceSettings))
    parts = ["## Every service", service_table(ServiceSettings, without=frozenset())]
    for title, _, struct in SERVICES:
        mine = frozenset(
            field.name
            for field in msgspec.structs.fields(struct)
            if field.name in shared and field.name not in struct.__annotations__
        )
        parts += [f"## {title}", service_table(struct, without=mine)]
    parts += [
        "## Vendors",
        VENDORS,
        plain_table(VendorSettings),
        "## Device configuration",
        DEVICES,
        plain_table(DeviceConfig, without=frozenset({"defaults", "rules"})),
        "`[defaults]`:",
        plain_table(DeviceDefaults),
        "`[[rules]]`:",
        plain_table(Rule),
        "## Queues",
        QUEUES,
        plain_table(QueueConfig),
        "## SKUs",
        SKUS,
        plain_table(SkuFile, without=frozenset({"sku", "neutral"})),
        "`[[sku]]`:",
        plain_table(Sku, without=frozenset({"alternative"})),
        "`[[sku.alternative]]`, and `[[neutral]]` without amounts:",
        plain_table(AlternativeConfig),
    ]
    return "\n\n".join(parts)


def main() -> int:
    """Write, or with ``--check`` compare; the exit code."""
    return write_parts(DOCS / "settings.md", {"settings": tables()})


if __name__ == "__main__":
    sys.exit(main())
