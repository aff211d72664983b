# SPDX-License-Identifier: Apache-2.0
"""The components region and hub: one name reaches every object, and the server accepts its file."""

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from hami_common.bus import grants
from hami_common.bus.nkeys import NKey
from hami_common.runtime.natsio import BusLimits, regions
from hami_common.runtime.natsio.layout import reserved_bytes
from hami_sim.natsd import find_nats_server
from tests.support.kustomize import overlay, rendered
from tests.support.shippedbus import relocated

KUSTOMIZE = Path(__file__).resolve().parents[3] / "deploy" / "kustomize"
COMPONENTS = KUSTOMIZE / "components"
HUB = "tls://hub.example:7422"
GIB = 1 << 30
pytestmark = [pytest.mark.real]
Obj = dict[str, Any]


def mine(directory: Path, component: str, data: Mapping[str, str]) -> dict[tuple[str, str], Obj]:
    """Objects of an overlay as docs/regions.md describes it."""
    example = yaml.safe_load((COMPONENTS / component / "example.yaml").read_text())
    example["data"] = dict(data)
    names = directory / "names.yaml"
    names.write_text(yaml.safe_dump(example))
    paths = [COMPONENTS / name for name in ("nats", "self-signed", component)]
    objects = rendered(overlay(directory / "mine", KUSTOMIZE / "base", paths, files=[names]))
    return {(one["kind"], one["metadata"]["name"]): one for one in objects}


def env_of(pod: Obj, container: str) -> dict[str, Any]:
    (found,) = (one for one in pod["containers"] if one["name"] == container)
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in found["env"]}


def pods_of(objects: dict[tuple[str, str], Obj]) -> tuple[Obj, Obj, list[Obj]]:
    """Pods of the bus, the registry, and the two ways in which bootstrap runs."""
    bus = objects["StatefulSet", "hami-nats"]["spec"]["template"]["spec"]
    registry = objects["Deployment", "hami-registry"]["spec"]["template"]["spec"]
    job = objects["Job", "hami-bootstrap"]["spec"]["template"]["spec"]
    cron = objects["CronJob", "hami-bootstrap"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    return bus, registry, [job, cron]


def claimed_gib(objects: dict[tuple[str, str], Obj]) -> int:
    (claim,) = objects["StatefulSet", "hami-nats"]["spec"]["volumeClaimTemplates"]
    return int(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Gi"))


def file_store_gib(component: str) -> int:
    text = (COMPONENTS / component / "nats.conf").read_text()
    (found,) = re.findall(r"(?m)^\s*max_file_store: (\d+)GB$", text)
    return int(found)


def accepts(directory: Path, component: str, part: grants.Regions, env: Mapping[str, str]) -> str:
    """Return the refusal of a NATS server that checks the component's file; empty: it accepts."""
    users = {name: NKey.generate("user").public for name in grants.STATIC_USERS}
    accounts = grants.server_config(
        issuer=NKey.generate("account").public, users=users, regions=part
    )
    # The files of certificates are not there; everything else is checked.
    accounts = re.sub(r'"tls": \{\s*"ca_file": "[^"]*"\s*\},?', "", accounts)
    text = relocated((COMPONENTS / component / "nats.conf").read_text(), directory.joinpath)
    text = re.sub(r"(?s)\n( *)tls \{.*?\n\1\}", "", text)
    (directory / "accounts.conf").write_text(accounts)
    (directory / "nats.conf").write_text(text)
    done = subprocess.run(
        [find_nats_server(), "-t", "-c", directory / "nats.conf"],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if done.returncode == 0 else done.stderr


def test_region_is_named_once(tmp_path: Path) -> None:
    objects = mine(tmp_path, "region", {"region": "east", "hub": HUB})
    bus, registry, bootstraps = pods_of(objects)
    assert env_of(bus, "nats")["HAMI_REGION"] == "east"
    seed = env_of(bus, "nats")[grants.SEED_VARIABLE]["secretKeyRef"]
    assert seed == {"name": "hami-bus-regions", "key": "seed"}
    assert env_of(registry, "registry")["HAMI_REGISTRY_REGION"] == "east"
    for pod in bootstraps:
        env = env_of(pod, "bootstrap")
        assert env == {"HAMICTL_REGION": "east", "HAMICTL_HUB": HUB}
    assert "hami-bus-regions" in objects["Role", "hami-bootstrap"]["rules"][0]["resourceNames"]
    assert ("ConfigMap", "hami-region") not in objects


def test_hub_names_its_regions_once(tmp_path: Path) -> None:
    leaves = f"east={NKey.generate('user').public}"
    objects = mine(tmp_path, "hub", {"regions": '["east"]', "leaves": leaves, "names": "h.example"})
    bus, registry, bootstraps = pods_of(objects)
    assert env_of(registry, "registry")["HAMI_REGISTRY_REGIONS"] == '["east"]'
    for pod in bootstraps:
        env = env_of(pod, "bootstrap")
        assert env == {"HAMICTL_LEAVES": leaves, "HAMICTL_BUS_NAMES": "h.example"}
    (service,) = objects["Service", "hami-hub"]["spec"]["ports"]
    ports = {port["name"]: port["containerPort"] for port in bus["containers"][0]["ports"]}
    assert ports[service["targetPort"]] == service["port"] == 7422


def test_servers_hold_streams_and_copies(tmp_path: Path) -> None:
    limits = BusLimits()
    own = reserved_bytes(limits)
    outbox = sum(one["max_bytes"] for one in regions.outbox(limits, source="x"))
    copies = sum(one["max_bytes"] for one in regions.copies("east", limits))
    assert file_store_gib("region") * GIB > (own + outbox) * 1.1
    assert file_store_gib("hub") * GIB >= own + 7 * copies
    for component, data in (
        ("region", {"region": "east", "hub": HUB}),
        ("hub", {"regions": "[]", "leaves": "", "names": ""}),
    ):
        directory = tmp_path / component
        directory.mkdir()
        claimed = claimed_gib(mine(directory, component, data))
        assert claimed >= file_store_gib(component) * 1.3


def test_server_accepts_the_files(tmp_path: Path) -> None:
    key = NKey.generate("user")
    region = grants.Regions(
        public=key.public, region="east", source=grants.source_token(key.seed), hub=HUB
    )
    env = {"POD_NAME": "hami-nats-0", "HAMI_REGION": "east", grants.SEED_VARIABLE: key.seed}
    assert accepts(tmp_path, "region", region, env) == ""
    assert key.seed not in (tmp_path / "accounts.conf").read_text()
    without = {name: text for name, text in env.items() if name != grants.SEED_VARIABLE}
    assert grants.SEED_VARIABLE in accepts(tmp_path, "region", region, without)
    hub = grants.Regions(public=key.public, leaf_by_region={"east": NKey.generate("user").public})
    assert accepts(tmp_path, "hub", hub, env) == ""
