# SPDX-License-Identifier: Apache-2.0
"""The files of deploy/ match each other and the services that read them."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from hami_common import namespaces
from hami_common.runtime.settings import ServiceSettings, load
from hami_common.skus import catalog as skus
from hami_common.vendors.catalog import Catalog
from hami_core.quota import queues
from hami_core.replay.policies import parse as parse_policies
from hami_nodeagent.settings import Settings as Nodeagent
from hami_registry.core.device_config import DeviceConfig, parse
from hami_registry.settings import Settings as Registry
from hami_scheduler.settings import Settings as Scheduler
from hami_webhook.settings import Settings as Webhook
from hamictl.commands import bootstrap
from tests.support.containerfile import Containerfile
from tools.images.builder import CONSOLE

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
KUSTOMIZE = DEPLOY / "kustomize"
TYPES: dict[str, type[ServiceSettings]] = {
    "webhook": Webhook,
    "scheduler": Scheduler,
    "registry": Registry,
    "nodeagent": Nodeagent,
}
CONFIGURATIONS = sorted(path for path in KUSTOMIZE.rglob("config/*.toml") if path.stem in TYPES)
MANIFESTS = [
    (path.relative_to(KUSTOMIZE), document)
    for path in sorted(KUSTOMIZE.rglob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
    if document
]
OBJECTS = [(path, document) for path, document in MANIFESTS if "metadata" in document]


def pods() -> list[tuple[str, dict[str, Any]]]:
    """Pod templates by path."""
    found = []
    for path, document in MANIFESTS:
        spec = document.get("spec") or {}
        template = spec.get("jobTemplate", {}).get("spec", spec).get("template")
        if template:
            found.append((f"{path}:{document['kind']}", template["spec"]))
    return found


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: str(path.relative_to(KUSTOMIZE)))
def test_settings_are_those_of_the_service(path: Path) -> None:
    environ = {"HAMI_NODEAGENT_NODE_NAME": "n"} if path.stem == "nodeagent" else {}
    loaded = load(
        TYPES[path.stem], service=path.stem, argv=["--config", str(path)], environ=environ
    )
    assert loaded.settings.nats_urls == ["tls://nats.hami-system.svc:4222"]
    assert loaded.settings.nats_ca_file
    assert loaded.settings.nats_seed_file or loaded.settings.nats_token_file


def test_device_configuration_is_parsed() -> None:
    text = (KUSTOMIZE / "base/config/devices.toml").read_bytes()
    assert parse(text, name="devices.toml") == DeviceConfig()


def test_queues_file_is_mounted_where_the_scheduler_reads_it_and_is_parsed() -> None:
    """Under a name without a hash: an edit reaches the running scheduler and recreates no pod."""
    base = yaml.safe_load((KUSTOMIZE / "base/kustomization.yaml").read_text())
    (entry,) = (one for one in base["configMapGenerator"] if one["name"] == "hami-queues")
    assert entry["options"] == {"disableNameSuffixHash": True}
    (source,) = entry["files"]
    assert not queues.parse(tomllib.loads((KUSTOMIZE / "base" / source).read_text()), vendors=())
    (pod,) = (pod for where, pod in pods() if where == "base/scheduler.yaml:Deployment")
    (volume,) = (one for one in pod["volumes"] if one["name"] == "queues")
    assert volume["configMap"]["name"] == entry["name"]
    (container,) = (one for one in pod["containers"] if one["name"] == "scheduler")
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    for path in CONFIGURATIONS:
        if path.stem == "scheduler":
            file = Path(tomllib.loads(path.read_text())["queues_file"])
            assert (str(file.parent), file.name) == (mounted["queues"], Path(source).name), path


def test_catalog_of_skus_is_mounted_where_webhook_and_registry_read_it_and_is_parsed() -> None:
    """Under a name without a hash, as the queues file."""
    base = yaml.safe_load((KUSTOMIZE / "base/kustomization.yaml").read_text())
    (entry,) = (one for one in base["configMapGenerator"] if one["name"] == "hami-skus")
    assert entry["options"] == {"disableNameSuffixHash": True}
    (source,) = entry["files"]
    vendors = Catalog.from_settings()
    assert not skus.parse((KUSTOMIZE / "base" / source).read_bytes(), vendors=vendors).skus
    for service in ("webhook", "registry"):
        (pod,) = (pod for where, pod in pods() if where == f"base/{service}.yaml:Deployment")
        (volume,) = (one for one in pod["volumes"] if one["name"] == "skus")
        assert volume["configMap"]["name"] == entry["name"]
        (container,) = (one for one in pod["containers"] if one["name"] == service)
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        paths = [path for path in CONFIGURATIONS if path.stem == service]
        for path in paths:
            file = Path(tomllib.loads(path.read_text())["skus_file"])
            assert (str(file.parent), file.name) == (mounted["skus"], Path(source).name), path


def test_profiles_replace_the_catalog_or_the_queues_by_valid_ones() -> None:
    """One profile lets tenants ask by SKU only, the other divides capacity among departments."""
    components = KUSTOMIZE / "components"
    for profile, name in (("public-cloud", "hami-skus"), ("private-cloud", "hami-queues")):
        document = yaml.safe_load((components / profile / "kustomization.yaml").read_text())
        (entry,) = document["configMapGenerator"]
        assert (entry["name"], entry["behavior"]) == (name, "replace")
        assert entry["options"] == {"disableNameSuffixHash": True}
    text = (components / "public-cloud/skus.toml").read_bytes()
    catalog = skus.parse(text, vendors=Catalog.from_settings())
    assert catalog.file.required
    assert {sku.service_class for sku in catalog.skus} == {"guaranteed", "burstable", "spot"}
    tree = tomllib.loads((components / "private-cloud/queues.toml").read_text())
    assert "research" in queues.parse(tree, vendors=()).queues


def test_policies_of_the_component_are_mounted_and_parsed() -> None:
    directory = KUSTOMIZE / "components/policies"
    component = yaml.safe_load((directory / "kustomization.yaml").read_text())
    (entry,) = component["configMapGenerator"]
    (patch,) = component["patches"]
    pod = yaml.safe_load(patch["patch"])["spec"]["template"]["spec"]
    (container,), (volume,) = pod["containers"], pod["volumes"]
    (variable,), (mount,) = container["env"], container["volumeMounts"]
    file = Path(variable["value"])
    assert (volume["name"], volume["configMap"]["name"]) == (mount["name"], entry["name"])
    assert (str(file.parent), [file.name]) == (mount["mountPath"], entry["files"])
    shipped = parse_policies(tomllib.loads((directory / file.name).read_text()))
    assert shipped.policies[shipped.default].policy() == Scheduler(signing_key_file="").policy
    assert shipped.canary is None


def test_pods_that_wait_are_tried_again_within_two_seconds_of_returned_capacity() -> None:
    """The longest of our pause between two touches of a node and kube-scheduler's for one pod."""
    shipped = yaml.safe_load((KUSTOMIZE / "base/kube-scheduler.yaml").read_text())
    pause_s = Scheduler(signing_key_file="").capacity_touch_s
    assert max(pause_s, shipped["podMaxBackoffSeconds"]) <= 2
    assert shipped["podInitialBackoffSeconds"] <= shipped["podMaxBackoffSeconds"]


def test_every_image_is_built_here_or_is_third_party() -> None:
    built = set(Containerfile(DEPLOY / "Containerfile").images())
    images = {c["image"] for _, pod in pods() for c in pod["containers"]}
    names = {image.removeprefix("hami/") for image in images}
    assert names - built == {"otel/opentelemetry-collector"}
    assert built <= names


def test_base_image_is_a_build_argument() -> None:
    """Without a default, a build needs an explicit base image."""
    text = (DEPLOY / "Containerfile").read_text()
    outside = set(re.findall(r"(?m)^FROM (\S+)", text)) - set(re.findall(r" AS (\w+)", text))
    assert outside == {"${BASE}", "scratch"}
    assert re.search(r"(?m)^ARG BASE$", text)


SOURCES = """\
Types: deb
# http://snapshot.example/archive/debian/20260801T000000Z
URIs: http://debian.example/debian
Suites: bookworm bookworm-updates

Types: deb
# http://snapshot.example/archive/debian-security/20260801T000000Z
URIs: http://debian.example/debian-security
Suites: bookworm-security
"""


def test_packages_come_from_the_snapshot_that_the_base_names(tmp_path: Path) -> None:
    sources = tmp_path / "debian.sources"
    sources.write_text(SOURCES)
    command = ["sh", str(DEPLOY / "apt-snapshot.sh"), str(sources)]
    assert subprocess.run(command, check=False).returncode == 0
    assert re.findall(r"(?m)^URIs: (.*)$", sources.read_text()) == [
        "http://snapshot.example/archive/debian/20260801T000000Z",
        "http://snapshot.example/archive/debian-security/20260801T000000Z",
    ]
    assert "debian.example" not in sources.read_text()
    sources.write_text(SOURCES.replace("# http", "# see http"))
    refused = subprocess.run(command, check=False, capture_output=True, text=True)
    assert refused.returncode == 1
    assert "names no snapshot" in refused.stderr


def test_files_that_images_copy_exist() -> None:
    for line in (DEPLOY / "Containerfile").read_text().splitlines():
        if line.startswith("COPY") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert source == CONSOLE or (ROOT / source).exists(), line


@pytest.mark.parametrize(("where", "pod"), pods(), ids=[where for where, _ in pods()])
def test_containers_have_no_right_they_do_not_name(where: str, pod: dict[str, Any]) -> None:
    for container in pod["containers"]:
        context = container["securityContext"]
        profile = pod["securityContext"] | context
        assert profile["seccompProfile"] == {"type": "RuntimeDefault"}
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"]["drop"] == ["ALL"]
        assert container["resources"]["limits"]["memory"]
    is_agent = "nodeagent" in where
    is_root = is_agent or "agent-devices" in where
    assert bool(pod.get("hostPID")) is is_agent
    assert bool(pod.get("securityContext", {}).get("runAsNonRoot")) is not is_root
    assert pod["enableServiceLinks"] is False


def test_every_object_that_a_pod_mounts_is_created() -> None:
    generated = {
        entry["name"]
        for path, document in MANIFESTS
        if path.name == "kustomization.yaml"
        for entry in document.get("configMapGenerator", ())
    }
    made_at_start = {
        bootstrap.TRUSTED_KEYS,
        bootstrap.SIGNING_KEY,
        bootstrap.SERVING,
        bootstrap.BUS_SERVING,
        bootstrap.REGISTRY_SERVING,
        bootstrap.SCHEDULER_SERVING,
        bootstrap.BIND_ADMISSION_SERVING,
        bootstrap.AUTHORITY_BUNDLE,
        *bootstrap.BUS_SECRETS,
    }
    made_by_kubernetes = {
        document["metadata"]["name"] for _, document in OBJECTS if document["kind"] == "Secret"
    }
    for where, pod in pods():
        for volume in pod.get("volumes", ()):
            name = volume.get("configMap", {}).get("name") or volume.get("secret", {}).get(
                "secretName"
            )
            assert name is None or name in generated | made_at_start | made_by_kubernetes, where


def test_account_that_makes_keys_may_read_and_renew_them() -> None:
    roles = [d for _, d in MANIFESTS if d.get("kind") == "Role"]
    rules = next(d["rules"] for d in roles if d["metadata"]["name"] == "hami-bootstrap")
    named = {
        (resource, name)
        for rule in rules
        for resource in rule["resources"]
        for name in rule.get("resourceNames", ())
    }
    secrets = {
        bootstrap.AUTHORITY,
        bootstrap.SIGNING_KEY,
        bootstrap.SERVING,
        bootstrap.BUS_SERVING,
        bootstrap.REGISTRY_SERVING,
        bootstrap.SCHEDULER_SERVING,
        bootstrap.BIND_ADMISSION_SERVING,
        *bootstrap.BUS_SECRETS,
    }
    maps = {bootstrap.TRUSTED_KEYS, bootstrap.AUTHORITY_BUNDLE, bootstrap.BUS_ACCOUNTS}
    assert named == {("secrets", n) for n in secrets} | {("configmaps", n) for n in maps}


def test_agents_mount_the_copies_in_their_namespace_and_no_secret() -> None:
    """Agent accounts read no key: only the public halves are copied."""
    generated = {"hami-nodeagent-config"}
    for where, pod in pods():
        if "nodeagent" in where:
            volumes = pod["volumes"]
            assert not [volume for volume in volumes if "secret" in volume], where
            maps = {volume["configMap"]["name"] for volume in volumes if "configMap" in volume}
            assert maps - generated == set(bootstrap.AGENTS_COPIES), where
    (rules,) = (
        document["rules"]
        for _, document in OBJECTS
        if (document["kind"], document["metadata"]["name"]) == ("Role", "hami-bootstrap")
        and document["metadata"]["namespace"] == namespaces.AGENTS
    )
    named = {name for rule in rules for name in rule.get("resourceNames", ())}
    assert named == set(bootstrap.AGENTS_COPIES)
    assert {one for rule in rules for one in rule["resources"]} == {"configmaps"}
