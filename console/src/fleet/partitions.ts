// SPDX-License-Identifier: Apache-2.0
// Reads the hardware partitions of a device, and where they lie on it (docs/mig.md).
//
// A word such as `1g.10gb@0 3g.40gb@4` lists profiles with their first memory slice; `2 vir04`
// counts profiles whose place the vendor does not report.

export interface Partition {
  readonly profile: string;
  /** Begin and end as parts of the device's memory; null: the place or size is not known. */
  readonly span: readonly [number, number] | null;
}

/** NVIDIA devices whose memory the driver divides into four slices; all others have eight. */
const FOUR_SLICES = /\bA30\b|RTX PRO/;

/** Partitions in the word, in the order of their places. */
export function partitionsOf(word: string, model: string, memory_mib: number): Partition[] {
  const found: Partition[] = [];
  const slices = FOUR_SLICES.test(model) ? 4 : 8;
  for (const [, count, profile = "", start] of word.matchAll(/(?:(\d+) )?([^\s@]+)(?:@(\d+))?/g)) {
    const gib = /\.(\d+)gb/.exec(profile)?.[1];
    const size = gib === undefined ? 0 : Math.round((Number(gib) * 1024 * slices) / memory_mib);
    const first = Number(start);
    const span: [number, number] | null =
      start === undefined || size === 0
        ? null
        : [first / slices, Math.min(1, (first + size) / slices)];
    for (let n = Number(count ?? 1); n > 0; n -= 1) found.push({ profile, span });
  }
  return found.sort((a, b) => (a.span?.[0] ?? 2) - (b.span?.[0] ?? 2));
}
