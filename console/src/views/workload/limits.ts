// SPDX-License-Identifier: Apache-2.0

import type { Registry, Scheduler } from "../../../generated/api.ts";

/** The sum of a pod's shares, for a row of the list. */
export function sharesOf(allocation: Registry.AllocationView): {
  devices: number;
  memoryMib: number;
} {
  const shares = allocation.containers.flatMap((container) => container.shares);
  return {
    devices: new Set(shares.map((share) => share.uuid)).size,
    memoryMib: shares.reduce((sum, share) => sum + share.memory_mib, 0),
  };
}

/** A resize of a container from the values of a form; undefined if nothing changes. */
export function resizeOf(
  pod: { namespace: string; pod: string },
  container: { name: string; memoryMib: number; corePct: number },
  memory: string,
  core: string,
): Scheduler.ResizeRequest | undefined {
  const memoryMib = memory === "" ? container.memoryMib : Number(memory);
  const corePct = core === "" ? container.corePct : Number(core);
  if (memoryMib === container.memoryMib && corePct === container.corePct) return undefined;
  return {
    ...pod,
    container: container.name,
    ...(memoryMib === container.memoryMib ? {} : { memory_mib: memoryMib }),
    ...(corePct === container.corePct ? {} : { core_pct: corePct }),
  };
}
