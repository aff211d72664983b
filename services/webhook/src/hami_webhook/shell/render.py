# SPDX-License-Identifier: Apache-2.0
"""Prints the MutatingWebhookConfiguration that fits the settings, as YAML on standard output.

The resource names come from the same settings as the service's own, so that what the API server
sends and what the webhook answers for cannot drift apart.
"""

import argparse
import base64
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from hami_common.admission.configuration import Client, mutating_webhook_configuration
from hami_common.errors import SettingsInvalid
from hami_common.runtime.settings import load
from hami_common.vendors.catalog import Catalog
from hami_webhook.settings import Settings

FLAG = "--render-configuration"


def render(argv: Sequence[str]) -> str:
    """Return YAML for the flags ``argv``; unknown ones are settings (``--config``, ``--set``)."""
    parser = argparse.ArgumentParser(
        prog="hami_webhook", description="Print the MutatingWebhookConfiguration as YAML."
    )
    parser.add_argument(FLAG, action="store_true", required=True)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--service", metavar="NAMESPACE/NAME", help="Service of the webhook")
    target.add_argument("--url", help="https URL of the webhook; without a path, /mutate")
    parser.add_argument("--port", type=int, default=443, help="port of the Service")
    parser.add_argument("--ca-file", type=Path, help="PEM bundle that signed the certificate")
    parser.add_argument("--name", default="hami-webhook", help="name of the object")
    parser.add_argument(
        "--with-modes",
        action="store_true",
        help="let a label of a namespace choose the allocation mode of its pods",
    )
    parser.add_argument("--timeout-s", type=int, default=10, help="1 to 30")
    flags, rest = parser.parse_known_args(argv)
    settings = load(Settings, service="webhook", argv=rest).settings
    document = mutating_webhook_configuration(
        Catalog.from_settings(settings.vendors).resource_names(),
        _client(flags),
        name=flags.name,
        timeout_s=flags.timeout_s,
        with_modes=flags.with_modes,
    )
    return msgspec.yaml.encode(document).decode()


def _client(flags: argparse.Namespace) -> Client:
    ca_bundle = _ca_bundle(flags.ca_file) if flags.ca_file else ""
    if flags.url:
        if not flags.url.startswith("https://"):
            raise SettingsInvalid(
                field="--url", problem=f"{flags.url!r} is not https", fix="write https://…/mutate"
            )
        path = urlsplit(flags.url).path.rstrip("/")
        if flags.with_modes and path not in ("", Client().path):
            raise SettingsInvalid(
                field="--url",
                problem=f"with --with-modes the path {path} has no meaning",
                fix="leave it out",
            )
        url = flags.url if path else f"{flags.url.rstrip('/')}{Client().path}"
        return Client(url=url, ca_bundle=ca_bundle)
    namespace, separator, service = flags.service.partition("/")
    if not (namespace and separator and service):
        raise SettingsInvalid(
            field="--service",
            problem=f"{flags.service!r} has no namespace or no name",
            fix="write NAMESPACE/NAME",
        )
    return Client(namespace=namespace, service=service, port=flags.port, ca_bundle=ca_bundle)


def _ca_bundle(path: Path) -> str:
    try:
        return base64.b64encode(path.read_bytes()).decode()
    except OSError as error:
        raise SettingsInvalid(
            field=f"--ca-file {path}",
            problem=error.strerror or str(error),
            fix="give the path of a readable PEM file",
        ) from error


def main(argv: Sequence[str]) -> int:
    """Print, and return the exit code."""
    try:
        sys.stdout.write(render(argv))
    except SettingsInvalid as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0
