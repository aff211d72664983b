// SPDX-License-Identifier: Apache-2.0
// Intervals of time that the view asks for, and its amounts as text.

import { formatDuration, formatNumber, NO_VALUE } from "../../format.ts";

export const RANGES = ["1h", "24h", "7d", "custom"] as const;
export type RangeName = (typeof RANGES)[number];

const SECONDS: Record<Exclude<RangeName, "custom">, number> = {
  "1h": 3_600,
  "24h": 86_400,
  "7d": 604_800,
};

/** Query parameters of an interval in Unix seconds; undefined while a custom one is incomplete. */
export function intervalOf(
  name: RangeName,
  custom: { from: string; to: string },
  nowMs: number,
): { from: string; to: string } | undefined {
  if (name !== "custom") {
    const to = nowMs / 1000;
    return { from: (to - SECONDS[name]).toFixed(3), to: to.toFixed(3) };
  }
  const [from, to] = [Date.parse(custom.from), Date.parse(custom.to)];
  if (!(from < to)) return undefined;
  return { from: (from / 1000).toFixed(3), to: (to / 1000).toFixed(3) };
}

/** Device-seconds as hours with two digits; less than an hour as minutes and seconds. */
export function formatDeviceTime(seconds: number | null | undefined, locale: string): string {
  if (seconds === null || seconds === undefined || seconds < 3600) {
    return formatDuration(seconds, locale);
  }
  return `${formatNumber(seconds / 3600, locale, 2)} h`;
}

/** An amount of money with the code of its currency. */
export function formatMoney(
  amount: number | null | undefined,
  currency: string,
  locale: string,
): string {
  if (amount === null || amount === undefined) return NO_VALUE;
  return new Intl.NumberFormat(locale, {
    style: "currency",
    currency,
    currencyDisplay: "code",
  }).format(amount);
}
