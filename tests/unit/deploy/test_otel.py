# SPDX-License-Identifier: Apache-2.0
"""The component that adds a collector for traces matches the manifests that it patches."""

from typing import Any

import pytest
import yaml

from hami_common.runtime.settings import load
from hami_nodeagent.settings import Settings as Nodeagent
from hami_scheduler.settings import Settings as Scheduler
from hami_webhook.settings import Settings as Webhook
from tests.unit.deploy.test_files import KUSTOMIZE, MANIFESTS

OTEL = KUSTOMIZE / "components" / "otel"
COMPONENT = yaml.safe_load((OTEL / "kustomization.yaml").read_text())
CONFIG = yaml.safe_load((OTEL / "config" / "collector.yaml").read_text())
OBJECTS = [(path, document) for path, document in MANIFESTS if "metadata" in document]
OWN = {document["kind"]: document for path, document in OBJECTS if "otel" in path.parts}
SERVICES: dict[str, Any] = {"webhook": Webhook, "scheduler": Scheduler, "nodeagent": Nodeagent}
PATCHES = [(patch["target"], yaml.safe_load(patch["patch"])) for patch in COMPONENT["patches"]]


def targets(target: dict[str, str]) -> list[dict[str, Any]]:
    """Manifests that a patch changes."""
    key, _, value = target.get("labelSelector", "").partition("=")
    return [
        document
        for _, document in OBJECTS
        if document["kind"] == target["kind"]
        and document["metadata"]["name"] == target.get("name", document["metadata"]["name"])
        and (not key or document["metadata"].get("labels", {}).get(key) == value)
    ]


@pytest.mark.parametrize(("target", "patch"), PATCHES, ids=lambda one: one.get("name", ""))
def test_each_service_is_configured_with_the_collector(
    target: dict[str, str], patch: dict[str, Any]
) -> None:
    (container,) = patch["spec"]["template"]["spec"]["containers"]
    ((name, value),) = [(one["name"], one["value"]) for one in container["env"]]
    word = name.split("_")[1].lower()
    found = targets(target)
    assert found
    for document in found:
        containers = document["spec"]["template"]["spec"]["containers"]
        (own,) = [one for one in containers if one["name"] == container["name"]]
        assert own["image"] == f"hami/{word}"
    environ = {name: value, "HAMI_NODEAGENT_NODE_NAME": "n"}
    if word != "nodeagent":
        del environ["HAMI_NODEAGENT_NODE_NAME"]
    config = KUSTOMIZE / "base" / "config" / f"{word}.toml"
    loaded = load(SERVICES[word], service=word, argv=["--config", str(config)], environ=environ)
    service = OWN["Service"]["metadata"]
    port = OWN["Service"]["spec"]["ports"][0]["port"]
    assert loaded.settings.otlp_endpoint == (
        f"http://{service['name']}.{service['namespace']}.svc:{port}"
    )


def test_every_service_with_spans_is_configured() -> None:
    names = {
        patch["spec"]["template"]["spec"]["containers"][0]["env"][0]["name"] for _, patch in PATCHES
    }
    assert names == {f"HAMI_{word.upper()}_OTLP_ENDPOINT" for word in SERVICES}


def test_collector_is_whole() -> None:
    pipeline = CONFIG["service"]["pipelines"]["traces"]
    for kind in ("receivers", "processors", "exporters"):
        assert set(pipeline[kind]) == CONFIG[kind].keys()
    assert CONFIG["service"]["extensions"] == list(CONFIG["extensions"])
    pod = OWN["Deployment"]["spec"]["template"]["spec"]
    ports = {one["name"]: one["containerPort"] for one in pod["containers"][0]["ports"]}
    assert CONFIG["receivers"]["otlp"]["protocols"]["http"]["endpoint"].endswith(
        f":{ports['otlp-http']}"
    )
    assert CONFIG["extensions"]["health_check"]["endpoint"].endswith(f":{ports['health']}")
    (generated,) = COMPONENT["configMapGenerator"]
    assert pod["volumes"][0]["configMap"]["name"] == generated["name"]


def test_network_policies_let_spans_through() -> None:
    (out,) = [d for _, d in OBJECTS if d["metadata"]["name"] == "hami-traces"]
    into = OWN["NetworkPolicy"]
    assert (
        out["spec"]["podSelector"]["matchExpressions"]
        == into["spec"]["ingress"][0]["from"][0]["podSelector"]["matchExpressions"]
    )
    assert out["spec"]["egress"][0]["to"][0]["podSelector"] == into["spec"]["podSelector"]
