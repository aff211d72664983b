// SPDX-License-Identifier: Apache-2.0
// Amounts, durations and times as text. Memory in MiB, compute in percent of one device, durations in seconds.

export const NO_VALUE = "–";

const formats = new Map<string, Intl.NumberFormat>();

function numberFormat(locale: string, digits: number): Intl.NumberFormat {
  const key = `${locale} ${digits}`;
  let format = formats.get(key);
  if (!format) {
    format = new Intl.NumberFormat(locale, { maximumFractionDigits: digits });
    formats.set(key, format);
  }
  return format;
}

export function formatNumber(value: number | null | undefined, locale: string, digits = 0): string {
  return value === null || value === undefined
    ? NO_VALUE
    : numberFormat(locale, digits).format(value);
}

/** Memory below 10 GiB in MiB, as requests name it; more in GiB with one digit. */
export function formatMemory(mib: number | null | undefined, locale: string): string {
  if (mib === null || mib === undefined) return NO_VALUE;
  if (Math.abs(mib) < 10 * 1024) return `${formatNumber(mib, locale)} MiB`;
  return `${formatNumber(mib / 1024, locale, 1)} GiB`;
}

export function formatPercent(pct: number | null | undefined, locale: string, digits = 0): string {
  return pct === null || pct === undefined ? NO_VALUE : `${formatNumber(pct, locale, digits)} %`;
}

/** The two largest units: `3 d 4 h`, `2 min 5 s`, `0.4 s`. */
export function formatDuration(seconds: number | null | undefined, locale: string): string {
  if (seconds === null || seconds === undefined) return NO_VALUE;
  if (seconds < 0) return `-${formatDuration(-seconds, locale)}`;
  if (seconds < 10) return `${formatNumber(seconds, locale, 1)} s`;
  let rest = Math.round(seconds);
  const parts: string[] = [];
  for (const [unit, size] of [
    ["d", 86_400],
    ["h", 3_600],
    ["min", 60],
    ["s", 1],
  ] as const) {
    const count = Math.floor(rest / size);
    rest -= count * size;
    if (count) parts.push(`${formatNumber(count, locale)} ${unit}`);
    else if (parts.length) break;
    if (parts.length === 2) break;
  }
  return parts.join(" ");
}

/** Device hours and other long sums, in hours with one digit. */
export function formatHours(hours: number | null | undefined, locale: string): string {
  return hours === null || hours === undefined ? NO_VALUE : `${formatNumber(hours, locale, 1)} h`;
}

/** Time between `then` and `now`, both in ms since 1970, as "3 minutes ago". */
export function formatAgo(then: number, now: number, locale: string): string {
  const seconds = Math.round((then - now) / 1000);
  const format = new Intl.RelativeTimeFormat(locale, { numeric: "auto", style: "short" });
  const size = Math.abs(seconds);
  if (size < 60) return format.format(seconds, "second");
  if (size < 3_600) return format.format(Math.trunc(seconds / 60), "minute");
  if (size < 86_400) return format.format(Math.trunc(seconds / 3_600), "hour");
  return format.format(Math.trunc(seconds / 86_400), "day");
}

/** Date and time to the second, in the browser's time zone. */
export function formatTime(ms: number, locale: string): string {
  return new Intl.DateTimeFormat(locale, { dateStyle: "short", timeStyle: "medium" }).format(ms);
}
