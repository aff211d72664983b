// SPDX-License-Identifier: Apache-2.0

import type { Registry } from "../../../generated/api.ts";

export type Totals = {
  devices: number;
  offering: number;
  capacityMib: number;
  freeMib: number;
  strandedMib: number;
};

export function strandedOf(model: Registry.ModelCapacity): number {
  return model.stranded.reduce((sum, one) => sum + one.memory_mib, 0);
}

export function totalsOf(models: readonly Registry.ModelCapacity[]): Totals {
  const totals = { devices: 0, offering: 0, capacityMib: 0, freeMib: 0, strandedMib: 0 };
  for (const model of models) {
    totals.devices += model.devices;
    totals.offering += model.devices_offering;
    totals.capacityMib += model.capacity_mib;
    totals.freeMib += model.free_mib;
    totals.strandedMib += strandedOf(model);
  }
  return totals;
}

export type Stranding = { name: string; models: string[]; memoryMib: number };

/** Stranded memory summed by a name (cause or namespace) over all models, largest first. */
export function strandedBy(
  models: readonly Registry.ModelCapacity[],
  partsOf: (model: Registry.ModelCapacity) => readonly { name: string; memoryMib: number }[],
): Stranding[] {
  const sums = new Map<string, Stranding>();
  for (const model of models) {
    for (const { name, memoryMib } of partsOf(model)) {
      const sum = sums.get(name) ?? { name, models: [], memoryMib: 0 };
      sum.memoryMib += memoryMib;
      if (!sum.models.includes(model.model)) sum.models.push(model.model);
      sums.set(name, sum);
    }
  }
  return [...sums.values()].sort((a, b) => b.memoryMib - a.memoryMib);
}
