# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence

def main(command_arguments: Sequence[str]) -> int: ...
