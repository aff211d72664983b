// SPDX-License-Identifier: Apache-2.0

import { signal } from "@preact/signals";
import {
  formatAgo,
  formatDuration,
  formatHours,
  formatMemory,
  formatNumber,
  formatPercent,
  formatTime,
} from "../format.ts";
import { language } from "../preferences.ts";

type Value = number | null | undefined;

export function Count({ value }: { value: Value }) {
  return <span class="amount">{formatNumber(value, language.value)}</span>;
}

/** Memory in MiB; the exact amount is the tooltip where GiB is shown. */
export function Memory({ mib }: { mib: Value }) {
  const exact = mib === null || mib === undefined ? undefined : `${mib} MiB`;
  return (
    <span class="amount" title={exact}>
      {formatMemory(mib, language.value)}
    </span>
  );
}

export function Percent({ pct, digits = 0 }: { pct: Value; digits?: number }) {
  return <span class="amount">{formatPercent(pct, language.value, digits)}</span>;
}

export function Duration({ seconds }: { seconds: Value }) {
  return <span class="amount">{formatDuration(seconds, language.value)}</span>;
}

export function Hours({ hours }: { hours: Value }) {
  return <span class="amount">{formatHours(hours, language.value)}</span>;
}

/** The present time in ms, updated every second while a component reads it. */
export const now = signal(Date.now());
let readers = 0;
let timer: ReturnType<typeof setInterval> | undefined;

/** Update `now` until the returned function is called. */
export function keepTime(): () => void {
  readers += 1;
  timer ??= setInterval(() => {
    now.value = Date.now();
  }, 1000);
  return () => {
    readers -= 1;
    if (readers) return;
    clearInterval(timer);
    timer = undefined;
  };
}

/** "3 min ago", with date and time as tooltip; `ms` since 1970. */
export function TimeAgo({ ms }: { ms: Value }) {
  if (ms === null || ms === undefined) return <span class="amount">–</span>;
  return (
    <time
      class="amount"
      dateTime={new Date(ms).toISOString()}
      title={formatTime(ms, language.value)}
    >
      {formatAgo(ms, Math.max(now.value, ms), language.value)}
    </time>
  );
}
