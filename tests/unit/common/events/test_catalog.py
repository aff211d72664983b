# SPDX-License-Identifier: Apache-2.0
"""The schemas of events that integrations read stay compatible after publication."""

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from hami_common.bus import subjects
from hami_common.errors import WireInvalid
from hami_common.events import codec
from hami_common.events.catalog import FAMILIES, TOKENS, EventFamily, family_of
from tests.support.schema_changes import breaks
from tools import gen_events

GOLDEN = Path(__file__).parents[3] / "golden" / "events"
PAYLOADS = sorted(path for path in GOLDEN.glob("*.v*/*.json"))
PUBLISHED = sorted((GOLDEN / "schemas").glob("*.json"))
BY_NAME = {family.schema_name: family for family in FAMILIES}

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # two of its models shadow a method of pydantic
    from asyncapi3.models import AsyncAPI3


def name_of(path: Path) -> str:
    return f"{path.parent.name}-{path.stem}"


# --- golden payloads ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAYLOADS, ids=name_of)
def test_published_payload_reads_and_writes_as_it_did(path: Path) -> None:
    family = BY_NAME[path.parent.name]
    data = path.read_bytes().removesuffix(b"\n")
    decoded = codec.decode(data, family.payload, what=str(path))
    assert codec.encode(decoded) == data


@pytest.mark.parametrize("path", PAYLOADS, ids=name_of)
def test_published_payload_fits_the_schema_of_today_and_of_then(path: Path) -> None:
    document = json.loads(path.read_bytes())
    published = json.loads((GOLDEN / "schemas" / f"{path.parent.name}.json").read_bytes())
    for schema in (gen_events.payload_schema(BY_NAME[path.parent.name]), published):
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.validate(document, schema, cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_payloads_show_every_field_that_was_published(path: Path) -> None:
    published = json.loads(path.read_bytes())
    schemas = [published, *published.get("$defs", {}).values()]
    fields = {name for schema in schemas for name in schema.get("properties", {})}
    seen: set[str] = set()
    for payload in (GOLDEN / path.stem).glob("*.json"):
        json.loads(payload.read_bytes(), object_hook=seen.update)
    assert fields - seen == set()


def test_every_family_publishes_its_schema() -> None:
    assert {path.stem for path in PUBLISHED} >= BY_NAME.keys()
    assert {path.parent.name for path in PAYLOADS} >= BY_NAME.keys()


# --- published schemas --------------------------------------------------------------------------


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_published_version_is_still_sent_and_means_the_same(path: Path) -> None:
    """A payload change beyond new optional fields requires a new version beside the old one."""
    published = json.loads(path.read_bytes())
    assert breaks(published, gen_events.payload_schema(BY_NAME[path.stem])) == []


def changed(change: Callable[[dict[str, Any]], object]) -> list[str]:
    published = json.loads((GOLDEN / "schemas" / "decision.v1.json").read_bytes())
    other = copy.deepcopy(published)
    change(other)
    return breaks(published, other)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda s: s["properties"].pop("node"), "$.node: gone"),
        (lambda s: s["properties"]["node"].update(type="integer"), "$.node[type]"),
        (lambda s: s["properties"]["verb"]["enum"].append("evict"), "$.verb[enum]"),
        (lambda s: s["required"].remove("verdict"), "$.verdict: no longer"),
        (lambda s: s["required"].append("error"), "$.error: required"),
        (lambda s: s["$defs"]["Victim"]["properties"].pop("pod_uid"), "$.victims[items].pod_uid"),
        (lambda s: s["$defs"]["NodeScore"]["prefixItems"].pop(), "$.feasible[items][prefixItems]"),
        (lambda s: s["properties"]["node"].update(maxLength=10**6), "$.node[maxLength]"),
        (lambda s: s["properties"]["time_s"].pop("minimum"), "$.time_s[minimum]"),
    ],
    ids=["field", "type", "value", "optional", "required", "nested", "array", "wider", "endless"],
)
def test_breaking_change_is_found(change: Callable[[dict[str, Any]], object], told: str) -> None:
    found = changed(change)
    assert found
    assert any(line.startswith(told) for line in found), found


def test_added_optional_field_is_compatible() -> None:
    assert changed(lambda s: s["properties"].update(more={"type": "string", "default": ""})) == []


def test_narrower_range_is_compatible() -> None:
    assert changed(lambda s: s["properties"]["node"].update(maxLength=10)) == []
    assert changed(lambda s: s["properties"]["time_s"].update(minimum=1)) == []


# --- subjects -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.word)
def test_subjects_are_those_that_are_published(family: EventFamily) -> None:
    made = {
        "allocation": f"{subjects.EVENT_PREFIX}.allocation.{subjects.allocation_key('n.x', 'u')}",
        "state": f"{subjects.EVENT_PREFIX}.state.{subjects.allocation_key('n.x', 'u')}",
        "device": f"{subjects.EVENT_PREFIX}.device.{subjects.devices_key('n.x', 'nvidia')}",
        "partition": subjects.partition_event("n.x", "nvidia"),
        "decision": subjects.decision_event("ns", "pod.x"),
        "admission": subjects.admission_event("ns", "pod-"),
        "usage": subjects.usage_event("n.x"),
        "idleaction": subjects.idle_action_event("n.x", "u"),
        "idle": subjects.idle_event("n.x", "u"),
        "breach": subjects.breach_event("n.x", ""),
        "quarantine": subjects.quarantine_event("scheduler", "pod.x"),
        "policy": f"{subjects.EVENT_PREFIX}.policy.{subjects.policy_key('p.x', '6f0c2b1e')}",
    }[family.word]
    assert family_of(made) is family
    assert made.count(".") == family.subject_filter.count(".") == family.address.count(".")


@pytest.mark.parametrize(
    "subject",
    [
        "hami.v1.event.usage",
        "hami.v1.event.usage.",
        "hami.v1.event.usage.a.b",
        "hami.v1.event.nothing.a",
        "hami.v2.event.usage.a",
        "hami.v1.alloc.a.b",
        "",
    ],
)
def test_other_subjects_are_no_events(subject: str) -> None:
    with pytest.raises(WireInvalid, match="is not one of an event"):
        family_of(subject)


def test_service_and_replica_of_a_quarantine_event_are_read_from_its_subject() -> None:
    subject = subjects.quarantine_event("nodeagent", "gpu-a.example")
    assert subjects.parse_quarantine_event(subject) == ("nodeagent", "gpu-a.example")
    for other in (f"{subject}.more", subject.rpartition(".")[0], subjects.usage_event("gpu-a")):
        with pytest.raises(WireInvalid, match=r"is not hami\.v1\.event\.quarantine"):
            subjects.parse_quarantine_event(other)


# --- the AsyncAPI document ----------------------------------------------------------------------


def references(node: object) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [found for value in node.values() for found in references(value)]
    if isinstance(node, list):
        return [found for value in node for found in references(value)]
    return []


def at(document: dict[str, Any], reference: str) -> Any:
    found: Any = document
    for part in reference.removeprefix("#/").split("/"):
        found = found[part]
    return found


def test_asyncapi_document_obeys_version_3_of_the_specification() -> None:
    document = json.loads(gen_events.ASYNCAPI.read_bytes())
    read = AsyncAPI3.model_validate(document)
    assert read.asyncapi == "3.0.0"
    assert document["channels"].keys() == {family.word for family in FAMILIES}
    for reference in references(document):
        assert isinstance(at(document, reference), dict), reference
    for channel in document["channels"].values():
        assert {f"{{{name}}}" for name in channel["parameters"]} == {
            token for token in channel["address"].split(".") if token.startswith("{")
        }


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.word)
def test_messages_of_the_document_match_the_sent_ones(family: EventFamily) -> None:
    document = json.loads(gen_events.ASYNCAPI.read_bytes())
    message = document["components"]["messages"][family.word]
    schema = {**message["payload"], "components": document["components"]}
    for example in message["examples"]:
        jsonschema.validate(example["payload"], schema, cls=jsonschema.Draft202012Validator)
    headers = codec.event_headers(
        event_id="1", event_type=family.types[0], source="/s/r", time_s=1.5, traceparent="00-"
    )
    jsonschema.validate(headers, message["headers"])
    for name in message["headers"]["required"]:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(headers | {name: 1}, message["headers"])
    assert set(family.tokens) <= TOKENS.keys()


def test_page_names_the_types_that_are_published() -> None:
    table = gen_events.page_tables()
    for family in FAMILIES:
        row = next(row for row in table.splitlines() if f"/{family.schema_name}.json" in row)
        stem, _, rest = row.split("`")[3].partition("{")
        kinds, _, end = rest.partition("}")
        types = [f"{stem}{kind}{end}" for kind in kinds.split(",")] if kinds else [stem]
        assert types == list(family.types)
