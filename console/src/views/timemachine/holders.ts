// SPDX-License-Identifier: Apache-2.0

import type { Registry } from "../../../generated/api.ts";

/** A share of one device. */
export type Holder = {
  node: string;
  namespace: string;
  pod: string;
  state: string;
  /** Absent: the node did not report the device. */
  device: { index: number; model: string } | undefined;
  /** Position among the shares of the document. */
  position: number;
  memoryMib: number;
  corePct: number;
};

/** The shares of a document of the fleet, in its order. */
export function holdersOf(document: Registry.FleetDocument): Holder[] {
  const { words, nodes, devices, allocations, shares } = document;
  const word = (position: number | undefined) => words[position ?? 0] ?? "";
  const found: Holder[] = [];
  let firstDevice = 0;
  let allocation = 0;
  nodes.name.forEach((node, at) => {
    const next = allocation + (nodes.allocations[at] ?? 0);
    for (; allocation < next; allocation += 1) {
      const end = found.length + (allocations.shares[allocation] ?? 0);
      while (found.length < end) {
        const position = found.length;
        const within = shares.device[position] ?? -1;
        const device = firstDevice + within;
        found.push({
          node,
          namespace: word(allocations.namespace[allocation]),
          pod: allocations.pod[allocation] ?? "",
          state: word(allocations.state[allocation]),
          device:
            within < 0
              ? undefined
              : { index: devices.index[device] ?? 0, model: word(devices.model[device]) },
          position,
          memoryMib: shares.memory_mib[position] ?? 0,
          corePct: shares.core_pct[position] ?? 0,
        });
      }
    }
    firstDevice += nodes.devices[at] ?? 0;
  });
  return found;
}
