// SPDX-License-Identifier: Apache-2.0

import type { Registry } from "../../../generated/api.ts";

export type Bar = {
  slice: Registry.Slice;
  lane: number;
  /** Begin and length, in percent of the time shown. */
  left: number;
  width: number;
};

/** Place slices of time in lanes, so that no two of a lane overlap; at times outside they are cut. */
export function lanesOf(
  slices: readonly Registry.Slice[],
  fromS: number,
  untilS: number,
): { bars: Bar[]; count: number } {
  const length = Math.max(untilS - fromS, 1);
  const ends: number[] = [];
  const bars: Bar[] = [];
  for (const slice of [...slices].sort((a, b) => a.begin_s - b.begin_s)) {
    const begin = Math.max(slice.begin_s, fromS);
    const end = Math.min(slice.end_s ?? untilS, untilS);
    if (end < fromS || begin > untilS) continue;
    let lane = ends.findIndex((free) => free <= begin);
    if (lane < 0) lane = ends.push(0) - 1;
    ends[lane] = end;
    bars.push({
      slice,
      lane,
      left: ((begin - fromS) / length) * 100,
      width: ((end - begin) / length) * 100,
    });
  }
  return { bars, count: ends.length };
}

/** Position of a time in percent of the time shown; undefined outside of it. */
export function positionOf(timeS: number, fromS: number, untilS: number): number | undefined {
  const part = ((timeS - fromS) / Math.max(untilS - fromS, 1)) * 100;
  return part < 0 || part > 100 ? undefined : part;
}

/** One of the six series colors for a pod, always the same. */
export function colorOfPod(namespace: string, pod: string): number {
  let sum = 0;
  for (const letter of `${namespace}/${pod}`)
    sum = (sum * 31 + (letter.codePointAt(0) ?? 0)) % 9973;
  return (sum % 5) + 1;
}
