# SPDX-License-Identifier: Apache-2.0
"""Bills of materials are valid CycloneDX and hold every pin with its hashes."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import referencing

from tools import sbom
from tools.pins import parse_pins

pytestmark = pytest.mark.timeout(60)  # a schema of 6,000 lines on a busy machine

SCHEMAS = files("cyclonedx.schema") / "_res"


def schema(name: str) -> Any:
    return json.loads((SCHEMAS / f"{name}.SNAPSHOT.schema.json").read_text())


@pytest.fixture(scope="module")
def bills(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("sbom") / "new"
    assert sbom.main(["--out", str(out)]) == 0
    return {name: json.loads((out / f"{name}.cdx.json").read_text()) for name in sbom.FILES}


@pytest.mark.parametrize("name", sbom.FILES)
def test_bill_is_valid(bills: dict[str, Any], name: str) -> None:
    others = [schema(one) for one in ("spdx", "jsf-0.82")]
    registry: Any = referencing.Registry().with_resources(
        (one["$id"], referencing.Resource.from_contents(one)) for one in others
    )
    validator = jsonschema.Draft7Validator(schema("bom-1.6"), registry=registry)
    validator.validate(bills[name])
    broken = bills[name] | {"specVersion": 1.6}
    assert not validator.is_valid(broken)


@pytest.mark.parametrize(("name", "pins"), sbom.FILES.items())
def test_every_pinned_package_is_in_it_with_every_hash(
    bills: dict[str, Any], name: str, pins: str
) -> None:
    text = (sbom.ROOT / "requirements" / f"{pins}.txt").read_text()
    wanted = {(pin.name, str(pin.version)): set(pin.hashes) for pin in parse_pins(text)}
    found = {
        (one["name"], one["version"]): {
            digest["content"]
            for reference in one["externalReferences"]
            for digest in reference["hashes"]
        }
        for one in bills[name]["components"]
        if one.get("purl", "").startswith("pkg:pypi/")
    }
    assert found == wanted
    assert all(wanted.values())


def test_packages_of_the_console_are_in_the_bill_of_the_images(bills: dict[str, Any]) -> None:
    direct = json.loads((sbom.ROOT / "console" / "package.json").read_text())
    npm = {
        name: {
            "/".join(filter(None, (one.get("group"), one["name"]))): one
            for one in bills[name]["components"]
            if one.get("purl", "").startswith("pkg:npm/")
        }
        for name in sbom.FILES
    }
    assert direct["dependencies"].keys() <= npm["hami-images"].keys()
    assert direct["devDependencies"].keys() <= npm["hami-build"].keys()
    assert not npm["hami-images"].keys() & direct["devDependencies"].keys()
    assert all(len(one["hashes"][0]["content"]) == 128 for one in npm["hami-images"].values())


def test_packages_of_the_project_are_in_the_bill_of_the_images(bills: dict[str, Any]) -> None:
    names = {one["name"] for one in bills["hami-images"]["components"]}
    ours = {
        "hami-common",
        "hami-core",
        "hamictl",
        "hami-nodeagent",
        "hami-registry",
        "hami-scheduler",
        "hami-webhook",
    }
    assert {one for one in names if one.startswith("hami")} == ours


def test_equal_sources_give_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    for folder in ("a", "b"):
        sbom.main(["--out", str(tmp_path / folder)])
    for name in sbom.FILES:
        first, second = (tmp_path / folder / f"{name}.cdx.json" for folder in ("a", "b"))
        assert first.read_bytes() == second.read_bytes()
        assert json.loads(first.read_text())["metadata"]["timestamp"].startswith("2023-11-14")
