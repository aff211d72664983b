// SPDX-License-Identifier: Apache-2.0

export type SortValue = string | number | boolean | null | undefined;
export type Order = { key: string; isDescending: boolean };

/** Compare numbers by size and text as people expect (`gpu-9` before `gpu-10`); missing values are last. */
export function compare(a: SortValue, b: SortValue): number {
  const missing = Number(isMissing(a)) - Number(isMissing(b));
  if (missing || isMissing(a) || isMissing(b)) return missing;
  if (typeof a === "string" && typeof b === "string") return collator.compare(a, b);
  return Number(a) - Number(b);
}

const collator = new Intl.Collator("en", { numeric: true });

function isMissing(value: SortValue): boolean {
  return value === null || value === undefined || value === "";
}

/** Sorted copy; rows with equal values keep their order, missing values are last in both directions. */
export function sorted<Row>(
  rows: readonly Row[],
  valueIn: (row: Row) => SortValue,
  isDescending: boolean,
): Row[] {
  return [...rows].sort((a, b) => {
    const [left, right] = [valueIn(a), valueIn(b)];
    if (isMissing(left) || isMissing(right)) return compare(left, right);
    return isDescending ? compare(right, left) : compare(left, right);
  });
}
