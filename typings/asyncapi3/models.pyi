# SPDX-License-Identifier: Apache-2.0
# What our tests use of asyncapi3, which ships no types.
from typing import Self

class AsyncAPI3:
    asyncapi: str
    @classmethod
    def model_validate(cls, obj: object) -> Self: ...
