# SPDX-License-Identifier: Apache-2.0
"""Applies an RFC 6902 patch, strictly, so that tests judge a patch by its effect."""

import copy
from typing import Any


def apply(document: Any, operations: list[dict[str, Any]]) -> Any:
    """``document`` after ``operations``; raises ``KeyError`` or ``IndexError`` on a wrong path."""
    root = {"": copy.deepcopy(document)}
    for operation in operations:
        tokens = [t.replace("~1", "/").replace("~0", "~") for t in operation["path"].split("/")]
        target: Any = root
        for token in tokens[:-1]:
            target = target[int(token)] if isinstance(target, list) else target[token]
        last = tokens[-1]
        kind, value = operation["op"], copy.deepcopy(operation.get("value"))
        if isinstance(target, list):
            if kind == "add":
                target.insert(len(target) if last == "-" else int(last), value)
            elif kind == "remove":
                del target[int(last)]
            else:
                target[int(last)] = value
        elif kind == "add":
            target[last] = value
        elif kind == "remove":
            del target[last]
        elif last in target:
            target[last] = value
        else:
            raise KeyError(operation["path"])
    return root[""]
