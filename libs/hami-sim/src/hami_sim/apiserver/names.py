# SPDX-License-Identifier: Apache-2.0
"""Syntax of names, labels and annotations, with the texts the real server gives.

Rules: ``k8s.io/apimachinery/pkg/util/validation`` and ``pkg/api/validation`` (Kubernetes 1.34).
Pure functions from text to a list of complaints, or from metadata to Causes.
"""

from __future__ import annotations

import re
from typing import Final

from hami_sim.apiserver.errors import (
    Cause,
    Obj,
    bad_request,
    bad_value,
    required,
    too_long,
)

_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUALIFIED: Final = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_VALUE: Final = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")

LABEL_MAX: Final = 63
SUBDOMAIN_MAX: Final = 253
ANNOTATIONS_MAX_BYTES: Final = 256 * 1024

_LABEL_TEXT: Final = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and "
    "must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used "
    "for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')"
)
_SUBDOMAIN_TEXT: Final = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or "
    "'.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used "
    "for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)
_QUALIFIED_TEXT: Final = (
    "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end "
    "with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for "
    "validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')"
)
_VALUE_TEXT: Final = (
    "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or "
    "'.', and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  "
    "or '12345', regex used for validation is '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')"
)


def _complaints(text: str, most: int, pattern: re.Pattern[str], problem: str) -> list[str]:
    found = [f"must be no more than {most} characters"] if len(text) > most else []
    return found if pattern.fullmatch(text) else [*found, problem]


def label_complaints(text: str) -> list[str]:
    """Check a DNS-1123 label."""
    return _complaints(text, LABEL_MAX, _LABEL, _LABEL_TEXT)


def subdomain_complaints(text: str) -> list[str]:
    """Check a DNS-1123 subdomain."""
    return _complaints(text, SUBDOMAIN_MAX, _SUBDOMAIN, _SUBDOMAIN_TEXT)


def qualified_complaints(text: str) -> list[str]:
    """Check `[prefix/]name`, as used for label keys, annotation keys and resources."""
    parts = text.split("/")
    if len(parts) > 2:  # noqa: PLR2004 - prefix and name
        text = (
            "a qualified name must consist of alphanumeric characters, '-', '_' or '.', and must "
            "start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or "
            "'123-abc', regex used for validation is "
            "'([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]') with an optional DNS subdomain prefix "
            "and '/' (e.g. 'example.com/MyName')"
        )
        return [text]
    found = []
    if len(parts) == 2:  # noqa: PLR2004 - prefix and name
        if not parts[0]:
            found.append("prefix part must be non-empty")
        else:
            found += [f"prefix part {text}" for text in subdomain_complaints(parts[0])]
    name = parts[-1]
    if not name:
        found.append("name part must be non-empty")
    elif len(name) > LABEL_MAX:
        found.append("name part must be no more than 63 characters")
    if not _QUALIFIED.fullmatch(name):
        found.append(_QUALIFIED_TEXT)
    return found


def label_value_complaints(text: str) -> list[str]:
    """Check a label value."""
    return _complaints(text, LABEL_MAX, _VALUE, _VALUE_TEXT)


def check_labels(labels: Obj, field: str) -> list[Cause]:
    """Check label keys and values."""
    found = []
    for key, value in labels.items():
        found += [bad_value(field, key, text) for text in qualified_complaints(key)]
        found += [bad_value(field, value, text) for text in label_value_complaints(value)]
    return found


def check_annotations(annotations: Obj, field: str) -> list[Cause]:
    """Check annotation keys and the total size."""
    found = []
    total = 0
    for key, value in annotations.items():
        found += [bad_value(field, key, text) for text in qualified_complaints(key.lower())]
        total += len(key.encode()) + len(value.encode())
    if total > ANNOTATIONS_MAX_BYTES:
        found.append(too_long(field, ANNOTATIONS_MAX_BYTES))
    return found


def check_string_maps(kind: str, version: str, metadata: Obj) -> None:
    """Refuse labels or annotations whose values are not text, as the typed decoder does."""
    for field in ("labels", "annotations"):
        for value in (metadata.get(field) or {}).values():
            if not isinstance(value, str):
                found = "number"
                if isinstance(value, bool):
                    found = "bool"
                elif isinstance(value, (dict, list)):
                    found = "object" if isinstance(value, dict) else "array"
                msg = (
                    f'{kind} in version "{version}" cannot be handled as a {kind}: json: cannot '
                    f"unmarshal {found} into Go struct field ObjectMeta.metadata.{field} of type "
                    "string"
                )
                raise bad_request(msg)


def check_metadata(metadata: Obj, *, as_label: bool, checks_name: bool = True) -> list[Cause]:
    """Check name, labels, annotations and owner references."""
    found: list[Cause] = []
    name = metadata.get("name", "")
    if not name:
        found.append(required("metadata.name", "name or generateName is required"))
    elif checks_name:
        complaints = label_complaints(name) if as_label else subdomain_complaints(name)
        found += [bad_value("metadata.name", name, text) for text in complaints]
    found += check_labels(metadata.get("labels") or {}, "metadata.labels")
    found += check_annotations(metadata.get("annotations") or {}, "metadata.annotations")
    for position, owner in enumerate(metadata.get("ownerReferences") or ()):
        field = f"metadata.ownerReferences[{position}]"
        found += [
            bad_value(f"{field}.{part}", "", f"{text} must not be empty")
            for part, text in (("kind", "kind"), ("name", "name"), ("uid", "uid"))
            if not owner.get(part)
        ]
        if "/" in owner.get("apiVersion", "").strip("/").replace("/", "", 1):
            found.append(
                bad_value(f"{field}.apiVersion", owner["apiVersion"], "version must not be empty")
            )
    for position, finalizer in enumerate(metadata.get("finalizers") or ()):
        found += [
            bad_value(f"metadata.finalizers[{position}]", finalizer, text)
            for text in qualified_complaints(finalizer)
        ]
    return found
