// SPDX-License-Identifier: Apache-2.0
// Reasons, estimates and amounts of waiting pods as text, for several views.

import type { Registry, Scheduler } from "../../../generated/api.ts";
import { formatDuration, formatMemory, formatNumber, formatPercent } from "../../format.ts";
import { t, tValue } from "../../i18n.ts";
import { language } from "../../preferences.ts";
import { Status, type Tone } from "../../ui/index.ts";

type Reason = Registry.Waiting["reason"] | Scheduler.WaitingRow["reason"];

const TONES: Record<NonNullable<Reason>, Tone> = {
  quota: "warn",
  queue: "warn",
  gang: "info",
  devices: "warn",
  request: "bad",
  "kube-scheduler": "info",
  error: "bad",
};

/** Class of the reason for which a pod waits. */
export function ReasonStatus({ reason }: { reason: Reason }) {
  if (reason === null) return <Status tone="neutral">{t("pending.reasons.none")}</Status>;
  return <Status tone={TONES[reason]}>{tValue("pending.reasons", reason)}</Status>;
}

/** Amount of a resource such as `nvidia/memory_mib`, with its unit. */
export function amountText(resource: string, amount: number): string {
  if (resource.endsWith("memory_mib")) return formatMemory(amount, language.value);
  if (resource.endsWith("core_pct")) return formatPercent(amount, language.value);
  return formatNumber(amount, language.value);
}

/** Name of a resource such as `nvidia/memory_mib`. */
export function resourceText(resource: string): string {
  const [kind = "", vendor = ""] = resource.split("/").reverse();
  const name = tValue("pending.resources", kind);
  return vendor ? `${vendor}: ${name}` : name;
}

/** The amounts over all vendors in one line, for example `8,000 MiB, 50 %, 2 devices`. */
export function amountsText(amounts: Readonly<Record<string, number>>): string {
  return Object.entries(amounts)
    .filter(([resource]) => !resource.includes("/"))
    .map(([resource, amount]) =>
      resource === "devices"
        ? t("pending.devicesCount", { count: amount })
        : amountText(resource, amount),
    )
    .join(", ");
}

/** The estimated wait, or why there is none. */
export function estimateText(estimate: Scheduler.Estimate): string {
  const values = {
    served: estimate.served,
    window: formatDuration(estimate.window_s, language.value),
  };
  if (estimate.wait_s === null) return t(`pending.estimates.${estimate.basis}`, values);
  return t("pending.estimates.rate", {
    ...values,
    wait: formatDuration(Math.round(estimate.wait_s), language.value),
  });
}
