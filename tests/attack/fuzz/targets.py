# SPDX-License-Identifier: Apache-2.0
"""All fuzzers by name."""

from tests.attack.fuzz.admission import Admission
from tests.attack.fuzz.bus import Bus
from tests.attack.fuzz.configurations import Configurations
from tests.attack.fuzz.extender import Extender
from tests.attack.fuzz.feeds import Feeds
from tests.attack.fuzz.laws import Target
from tests.attack.fuzz.regions import Regions

_ALL: tuple[Target, ...] = (Admission(), Extender(), Configurations(), Regions(), Feeds(), Bus())
TARGETS = {target.name: target for target in _ALL}
