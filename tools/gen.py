# SPDX-License-Identifier: Apache-2.0
"""Runs every generator of committed files; with ``--check`` only reports files that would change.

A generator is a program that writes its files, and with ``--check`` writes nothing and exits with 1
when a file differs. Each is registered once, in ``GENERATORS``.
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

GENERATORS: tuple[tuple[str, str], ...] = (
    ("kubelet protobufs, from proto/", "tools/gen_kubeletapi.py"),
    ("tables of codes and states in docs/runbook/, from the code", "tools/gen_codes.py"),
    ("the limiter's entry points in docs/, from its list", "tools/gen_symbols.py"),
    ("tables of docs/vendors.md, from the vendors", "tools/gen_vendors.py"),
    ("differences from HAMi in docs/migration.md, from their list", "tools/gen_migration.py"),
    ("default interfaces in docs/drivers.md, from the drivers", "tools/gen_drivers.py"),
    ("facts in docs/vendors/, from vendors, drivers and examples", "tools/gen_vendor_pages.py"),
    ("docs/proof.md, from tests/proof.toml, the tests and docs/gpu/", "tools/gen_proof.py"),
    ("checks and results in docs/gpu.md, from tests/gpu/ and docs/gpu/", "tools/gen_gpu.py"),
    ("payload tables in docs/wire.md, from the message Structs", "tools/gen_wire.py"),
    ("tables of docs/settings.md, from the settings", "tools/gen_settings.py"),
    ("docs/events.md, the AsyncAPI document and schemas, from the events", "tools/gen_events.py"),
    ("the catalogue in docs/metrics.md, from the services' metrics", "tools/gen_metrics.py"),
    ("dashboards and rules in deploy/kustomize/components/", "tools/gen_monitoring.py"),
    ("the command table of docs/hamictl.md, from hamictl's help", "tools/gen_hamictl.py"),
    ("the tables of docs/import.md, from hamictl's table of HAMi's keys", "tools/gen_import.py"),
    ("the services' OpenAPI documents, from their operations", "tools/gen_openapi.py"),
    ("the tables of docs/roles.md, from the table of routes and roles", "tools/gen_roles.py"),
    ("tested releases in docs/install.md, from the matrix of the tests", "tools/gen_releases.py"),
    ("resource names in deploy/kustomize/base/, from the vendors' catalog", "tools/gen_deploy.py"),
)
"""Generated content, and the program that generates it."""


def main() -> int:
    """Run all generators, also after one failed; returns the exit code."""
    parser = argparse.ArgumentParser(description="Make the generated files anew.")
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    flags = ["--check"] if parser.parse_args().check else []
    failed = [title for title, program in GENERATORS if not _succeeds([_module(program), *flags])]
    for title in failed:
        print(f"{title}: failed" + ("; run ./dev gen and commit" if flags else ""), file=sys.stderr)
    return 1 if failed else 0


def _module(program: str) -> str:
    return program.removesuffix(".py").replace("/", ".")


def _succeeds(arguments: list[str]) -> bool:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
