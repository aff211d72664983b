// SPDX-License-Identifier: Apache-2.0

import type { Scheduler } from "../../../generated/api.ts";

/** The policy as `binpack / spread`: of nodes, then of devices; empty: as recorded. */
export function nameOf(result: Pick<Scheduler.PolicyResult, "policy">): string {
  const { policy } = result;
  return policy ? `${policy.node_policy} / ${policy.device_policy.join(", ")}` : "";
}

/** How much more the first is, in steps of a tenth. */
export function changeOf(first: number, second: number): number {
  return Math.round(10 * (first - second)) / 10;
}

/** One line of a chart for each result. */
export function seriesOf(
  results: readonly Scheduler.PolicyResult[],
  label: (result: Scheduler.PolicyResult) => string,
  values: (series: Scheduler.Series) => readonly number[],
): { label: string; values: readonly number[] }[] {
  return results.map((one) => ({ label: label(one), values: values(one.series) }));
}
