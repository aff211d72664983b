// SPDX-License-Identifier: Apache-2.0

import type { Registry, Scheduler } from "../../../generated/api.ts";

/** Changes of the request that are listed; the API returns one for each amount. */
export const CHANGES_SHOWN = 3;

/** The ways without the more expensive changes of the request, in their order. */
export function changesShown(ways: readonly Scheduler.Way[]): Scheduler.Way[] {
  let changes = 0;
  return ways.filter((way) => {
    if (way.kind !== "less") return true;
    changes += 1;
    return changes <= CHANGES_SHOWN;
  });
}

export type DeviceRow = {
  node: string;
  uuid: string;
  code: string;
  wanted: Registry.Amounts | undefined;
  free: Registry.Amounts | undefined;
  holders: readonly Registry.DeviceHolder[];
  leftOut: number;
  foreignMib: number;
  burstMib: number;
};

/** The devices of the closest nodes; a node without devices of the vendor has one row with its code. */
export function deviceRows(decision: Registry.DecisionRecord): DeviceRow[] {
  return (decision.closest ?? []).flatMap((node): DeviceRow[] => {
    const devices = node.devices ?? [];
    if (!devices.length) {
      const { code } = node;
      return [
        {
          node: node.node,
          uuid: "",
          code,
          wanted: undefined,
          free: undefined,
          holders: [],
          leftOut: 0,
          foreignMib: 0,
          burstMib: 0,
        },
      ];
    }
    return devices.map((device) => ({
      node: node.node,
      uuid: device.uuid,
      code: device.code ?? "",
      wanted: device.wanted,
      free: device.free,
      holders: device.holders ?? [],
      leftOut: device.holders_left_out ?? 0,
      foreignMib: device.foreign_mib ?? 0,
      burstMib: device.burst_mib ?? 0,
    }));
  });
}

/** The terms of the newest score. */
export function scoresOf(
  decisions: readonly Registry.DecisionRecord[],
): Registry.ScoreDetail | undefined {
  return decisions.find((one) => one.scores)?.scores ?? undefined;
}
