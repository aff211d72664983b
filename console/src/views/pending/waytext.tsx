// SPDX-License-Identifier: Apache-2.0

import type { Scheduler } from "../../../generated/api.ts";
import { formatDuration, formatMemory } from "../../format.ts";
import { t, tValue } from "../../i18n.ts";
import { language } from "../../preferences.ts";

/** One way to start a pod as a sentence. */
export function WayText({ way }: { way: Scheduler.Way }) {
  switch (way.kind) {
    case "less":
      return <>{way.change ? lessText(way.change) : null}</>;
    case "wait":
      return (
        <>
          {t("pending.wait", {
            pods: (way.ends ?? []).map(occupantText).join(", "),
            node: way.node,
          })}
        </>
      );
    case "move":
      return (
        <>
          {t("pending.move", {
            moves: (way.moves ?? []).map(moveText).join("; "),
            node: way.node,
          })}
        </>
      );
    case "node":
      return <>{t("pending.addNode", { like: way.like ?? "" })}</>;
  }
}

function lessText(change: Scheduler.Change): string {
  const what = change.what
    .split(" and ")
    .map((one) => tValue("pending.changes", one))
    .join(t("pending.and"));
  const values = { what, fits: change.fits, asked: change.asked, node: change.node };
  return change.container
    ? t("pending.lessOf", { ...values, container: change.container })
    : t("pending.less", values);
}

function occupantText(one: Scheduler.Occupant): string {
  const name = one.name ? `${one.namespace}/${one.name}` : t("pending.otherNamespace");
  return t("pending.occupant", {
    name,
    memory: formatMemory(one.memory_mib, language.value),
    age: formatDuration(Math.round(one.age_s), language.value),
  });
}

function moveText(one: Scheduler.Move): string {
  return t("pending.moveOne", {
    name: one.pod ? `${one.namespace}/${one.pod}` : t("pending.otherNamespace"),
    memory: formatMemory(one.memory_mib, language.value),
    source: one.source,
    target: one.target,
  });
}
