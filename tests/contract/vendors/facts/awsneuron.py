# SPDX-License-Identifier: Apache-2.0
"""Facts about requests for AWS Neuron devices. Memory in MiB."""

from msgspec.structs import replace

from hami_common.model.device import Device, DeviceFacts
from hami_common.vendors import awsneuron
from hami_common.vendors.catalog import VendorSettings
from tests.contract.vendors.fact import Fact, copies
from tests.contract.vendors.shape import device

DEVICES, CORES = "aws.amazon.com/neuron", "aws.amazon.com/neuroncore"


def neuron(cores: int, type_: str = "trainium1") -> Device:
    """A device with ``cores`` NeuronCores."""
    facts = DeviceFacts(
        uuid="x",
        vendor="awsneuron",
        index=0,
        type=type_,
        memory_mib=32768,
        attributes={"cores": str(cores)},
    )
    return device(
        "awsneuron",
        type_,
        32768,
        partitions=awsneuron.partitions_of(facts),
        resources={awsneuron.CORES: cores},
        attributes={"cores": str(cores)},
    )


EIGHT = VendorSettings(awsneuron=awsneuron.AwsneuronSettings(cores_per_device=8))
WHOLE = "{}: 32768 MiB, 100 %, whole"

FACTS = (
    Fact(
        why="whole devices by count",
        on=neuron(2),
        limits={DEVICES: 1},
        gives=(WHOLE.format(0),),
        sees={"NEURON_RT_VISIBLE_CORES": "0-1", "AWS_NEURON_VISIBLE_DEVICES": "0"},
    ),
    Fact(
        why="one core is half a device",
        on=neuron(2),
        limits={CORES: 1},
        gives=("0: 16384 MiB, 50 %, 1nc",),
    ),
    Fact(
        why="all cores of a device are the device",
        on=neuron(2),
        limits={CORES: 2},
        gives=(WHOLE.format(0),),
    ),
    Fact(
        why="cores that are not whole devices",
        on=copies(neuron(2), 16),
        limits={CORES: 3},
        rejected="3 cores are not whole devices of 2; write up to 2, or a multiple of it",
    ),
    Fact(
        why="eight cores are four neighboring devices",
        on=copies(neuron(2), 16),
        limits={CORES: 8},
        gives=tuple(WHOLE.format(i) for i in range(4)),
    ),
    Fact(
        why="devices win over cores",
        on=neuron(2),
        limits={DEVICES: 1, CORES: 1},
        gives=(WHOLE.format(0),),
    ),
    *(
        Fact(
            why=f"{name} 0 is rejected",
            on=neuron(2),
            limits={name: 0},
            rejected=f"{name}]: 0 is no request",
        )
        for name in (DEVICES, CORES)
    ),
    Fact(
        why="devices with more than two cores",
        on=neuron(8, "trainium2"),
        limits={CORES: 4},
        settings=EIGHT,
        gives=("0: 16384 MiB, 50 %, 4nc",),
        differs="awsneuron-cores",
    ),
    Fact(
        why="three devices on Trainium",
        on=copies(neuron(2), 16),
        limits={DEVICES: 3},
        waits="CardTypeMismatch",
    ),
    Fact(
        why="any number of neighbors on Inferentia",
        on=copies(neuron(2, "inferentia2"), 4),
        limits={DEVICES: 3},
        gives=tuple(WHOLE.format(i) for i in range(3)),
    ),
    Fact(
        why="four devices are aligned, on Inferentia too",
        on=copies(neuron(2, "inferentia2"), 5)[1:],
        limits={DEVICES: 4},
        waits="CardTopologyInfeasible: 4 devices in aligned wanted",
        differs="awsneuron-aligned",
    ),
    Fact(
        why="cores of two containers share a device, which leaves sets whole",
        on=copies(neuron(2), 16),
        limits={CORES: 1},
        more=({CORES: 1},),
        annotations={"hami.io/gpu-scheduler-policy": "spread"},
        gives=("0: 16384 MiB, 50 %, 1nc", "0: 16384 MiB, 50 %, 1nc"),
    ),
    Fact(
        why="HAMi's numbers are the devices' identities",
        on=replace(neuron(2), uuid="node-AWSNeuron-0"),
        limits={DEVICES: 1},
        annotations={"aws.amazon.com/nouse-neuron-uuid": "node-AWSNeuron-0"},
        waits="CardUuidMismatch",
    ),
)
