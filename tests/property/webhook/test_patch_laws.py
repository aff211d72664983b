# SPDX-License-Identifier: Apache-2.0
"""Law: applying ``diff(a, b)`` to ``a`` gives ``b``, whatever the documents."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from jsonpatch import apply_patch

from hami_webhook.core.patch import diff

_scalars = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a", "x/y", "t~"])
_named = st.builds(lambda n, v: {"name": n, "value": v}, st.sampled_from("abcd"), _scalars)
_documents = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(_named, max_size=5)
        | st.dictionaries(st.sampled_from(["a", "b", "c/d", "e~f"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(_documents, _documents)
def test_applying_the_patch_gives_the_wanted_document(before: Any, after: Any) -> None:
    assert apply_patch(before, diff(before, after)) == after


@given(_documents)
def test_equal_documents_need_no_patch(document: Any) -> None:
    assert diff(document, document) == []
