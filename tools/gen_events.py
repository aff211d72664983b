# SPDX-License-Identifier: Apache-2.0
"""Generates docs/events.md (its tables), docs/asyncapi.json and docs/schemas/*.json.

All three come from ``hami_common.events.catalog`` and the payload Structs; examples are the golden
payloads of tests/golden/events.

python -m tools.gen_events            write the files
python -m tools.gen_events --check    exit 1 when one differs
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from hami_common.bus import subjects
from hami_common.events.catalog import FAMILIES, TOKENS, EventFamily
from hami_common.events.codec import event_headers
from tools.gen_wire import field_texts
from tools.generated import ROOT, replaced, write

PAGE = ROOT / "docs/events.md"
ASYNCAPI = ROOT / "docs/asyncapi.json"
SCHEMAS = ROOT / "docs/schemas"
GOLDEN = ROOT / "tests/golden/events"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
HEADER_TEXTS = {
    "ce-specversion": "Version of CloudEvents.",
    "ce-id": "Unique among the events of one source; the same when a message was sent twice.",
    "ce-type": "What happened, with the version of the payload.",
    "ce-source": "Who says so: `/<service>/<replica or node>`.",
    "ce-time": "When, by the clock of the source (RFC 3339).",
    "content-type": "Format of the payload.",
    "traceparent": "W3C Trace Context of the pod's trace; absent where there is none.",
}
"""Meaning of each header that ``event_headers`` creates."""

Document = dict[str, Any]


def payload_schema(family: EventFamily) -> Document:
    """Self-contained JSON Schema of a family's payload."""
    _, components = msgspec.json.schema_components([family.payload], ref_template="#/$defs/{name}")
    own = components.pop(family.payload.__name__)
    document = {
        "$schema": DIALECT,
        "$id": f"urn:hami:event:{family.schema_name}",
        **_described(family.payload, own),
    }
    if components:
        structs = {struct.__name__: struct for struct in _structs(family.payload)}
        document["$defs"] = {
            name: _described(structs[name], schema) for name, schema in sorted(components.items())
        }
    plain: Document = json.loads(
        json.dumps(document).replace(f'"#/$defs/{family.payload.__name__}"', '"#"')
    )
    return plain


def _described(struct: type[msgspec.Struct], schema: Document) -> Document:
    """Return the schema with the docstrings of the fields as descriptions."""
    texts = field_texts(struct)
    properties = {
        name: {**value, "description": texts[name]} if name in texts else value
        for name, value in schema.get("properties", {}).items()
    }
    summary = " ".join((struct.__doc__ or "").strip().split("\n\n")[0].split())
    return {**schema, "description": summary, **({"properties": properties} if properties else {})}


def _structs(struct: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    """Return the Struct and all Structs in its fields."""
    found: dict[type, None] = {}
    waiting: list[Any] = [msgspec.inspect.type_info(struct)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, msgspec.inspect.StructType):
            if node.cls in found:
                continue
            found[node.cls] = None
            waiting += [field.type for field in node.fields]
        for name in ("item_type", "key_type", "value_type"):
            if hasattr(node, name):
                waiting.append(getattr(node, name))
        for name in ("item_types", "types"):
            waiting += getattr(node, name, ())
    yield from found


def _examples(family: EventFamily) -> list[tuple[str, Document]]:
    """Golden payloads of the family's version, by name."""
    return [
        (path.stem, json.loads(path.read_bytes()))
        for path in sorted((GOLDEN / family.schema_name).glob("*.json"))
    ]


def headers_schema(family: EventFamily) -> Document:
    """JSON Schema of a family's message headers."""
    made = event_headers(event_id="i", event_type="t", source="/s", time_s=0, traceparent="p")
    properties: dict[str, Document] = {
        name: {"type": "string", "description": HEADER_TEXTS[name]} for name in made
    }
    properties["ce-specversion"]["const"] = made["ce-specversion"]
    properties["ce-type"]["enum"] = list(family.types)
    properties["ce-time"]["format"] = "date-time"
    properties["content-type"]["const"] = made["content-type"]
    return {
        "type": "object",
        "properties": properties,
        "required": sorted(name for name in made if name != "traceparent"),
    }


def _message(family: EventFamily) -> Document:
    schema = _moved(family, payload_schema(family))
    for key in ("$schema", "$id", "$defs"):
        schema.pop(key, None)
    return {
        "name": family.payload.__name__,
        "title": family.schema_name,
        "summary": family.tells,
        "contentType": "application/json",
        "headers": headers_schema(family),
        "payload": schema,
        "examples": [{"name": name, "payload": payload} for name, payload in _examples(family)],
    }


def _definitions() -> Document:
    schemas: Document = {}
    for family in FAMILIES:
        inner = _moved(family, payload_schema(family).get("$defs", {}))
        schemas |= {f"{family.word}_{name}": value for name, value in inner.items()}
    return schemas


def _moved(family: EventFamily, schema: Document) -> Document:
    """The schema with its references as they are inside the AsyncAPI document."""
    text = json.dumps(schema).replace('"#"', f'"#/components/messages/{family.word}/payload"')
    moved: Document = json.loads(text.replace('"#/$defs/', f'"#/components/schemas/{family.word}_'))
    return moved


def asyncapi() -> Document:
    """The AsyncAPI 3 document: HAMi sends, integrations receive."""
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "HAMi events",
            "version": "1",
            "description": (
                "What HAMi tells integrations, over the JetStream stream "
                f"{subjects.EVENTS_STREAM}. Generated from the code; see docs/events.md."
            ),
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "servers": {
            "bus": {
                "host": "nats.hami-system.svc:4222",
                "protocol": "nats",
                "description": "The NATS server of the installation, inside the cluster.",
            }
        },
        "channels": {
            family.word: {
                "address": family.address,
                "description": family.tells,
                "servers": [{"$ref": "#/servers/bus"}],
                "parameters": {token: {"description": TOKENS[token]} for token in family.tokens},
                "messages": {
                    family.word: {"$ref": f"#/components/messages/{family.word}"},
                },
            }
            for family in FAMILIES
        },
        "operations": {
            f"send_{family.word}": {
                "action": "send",
                "summary": family.tells,
                "channel": {"$ref": f"#/channels/{family.word}"},
                "messages": [{"$ref": f"#/channels/{family.word}/messages/{family.word}"}],
            }
            for family in FAMILIES
        },
        "components": {
            "messages": {family.word: _message(family) for family in FAMILIES},
            "schemas": _definitions(),
        },
    }


def page_tables() -> str:
    """The generated part of docs/events.md."""
    lines = [
        "| subject | `ce-type` | payload | written by |",
        "| --- | --- | --- | --- |",
    ]
    for family in FAMILIES:
        address = family.address.replace("{", "<").replace("}", ">")
        types = f"`{family.types[0]}`"
        if len(family.kinds) > 1:
            noun = family.noun or family.word
            types = f"`io.hami.{noun}.{{{','.join(family.kinds)}}}.v{family.version}`"
        schema = f"[{family.payload.__name__}](schemas/{family.schema_name}.json)"
        lines.append(f"| `{address}` | {types} | {schema} | {family.producer} |")
    lines += ["", "| token | |", "| --- | --- |"]
    used = {token for family in FAMILIES for token in family.tokens}
    lines += [f"| `<{name}>` | {text} |" for name, text in TOKENS.items() if name in used]
    for family in FAMILIES:
        lines += ["", f"### {family.word}", "", family.tells]
        if family.bucket:
            lines += ["", f"Copied by the server from the bucket `{family.bucket}`."]
        name, example = _examples(family)[0]
        lines += ["", f"Example ({name}):", "", "```json"]
        lines += json.dumps(example, indent=2).splitlines()
        lines += ["```"]
    return "\n".join(lines)


def outputs() -> Mapping[Path, str]:
    """Every generated file with its content."""
    files = {
        SCHEMAS / f"{family.schema_name}.json": _text(payload_schema(family)) for family in FAMILIES
    }
    files[ASYNCAPI] = _text(asyncapi())
    files[PAGE] = replaced(PAGE.read_text(encoding="utf-8"), {"families": page_tables()})
    return files


def _text(document: Document) -> str:
    return json.dumps(document, indent=1, sort_keys=False) + "\n"


def main() -> int:
    """Write, or with ``--check`` compare; the exit code."""
    files = outputs()
    return write(files, unwanted=set(SCHEMAS.glob("*.json")) - files.keys())


if __name__ == "__main__":
    sys.exit(main())
