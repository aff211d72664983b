// SPDX-License-Identifier: Apache-2.0
// Pods that wait; one pod with the reason of each device and the ways to start it.

import { Link, useLocation } from "wouter-preact";
import type { Registry } from "../../../generated/api.ts";
import { useGet } from "../../api/use.ts";
import { t } from "../../i18n.ts";
import { namespace } from "../../preferences.ts";
import {
  Answered,
  Card,
  type Column,
  Count,
  Empty,
  Figure,
  Figures,
  Page,
  Table,
  TimeAgo,
} from "../../ui/index.ts";
import type { ViewProps } from "../view.ts";
import { PodPage } from "./pod.tsx";
import { ReasonStatus } from "./texts.tsx";

const EVERY_S = 5;

export function PendingView({ params }: ViewProps) {
  if (params.namespace && params.pod) {
    return <PodPage namespace={params.namespace} pod={params.pod} />;
  }
  return <PendingList only={params.namespace} />;
}

export function pendingLink(one: { namespace: string; pod: string }): string {
  return `/pending/${encodeURIComponent(one.namespace)}/${encodeURIComponent(one.pod)}`;
}

function PendingList({ only }: { only: string | undefined }) {
  const answer = useGet("/v1/waiting", {
    query: { namespace: only ?? namespace.value },
    everyS: EVERY_S,
  });
  return (
    <Page title={t("pending.title")} intro={t("pending.intro")}>
      <Answered answer={answer}>{({ items }) => <Waiting items={items} />}</Answered>
    </Page>
  );
}

function Waiting({ items }: { items: readonly Registry.Waiting[] }) {
  const [, navigate] = useLocation();
  if (!items.length) return <Empty>{t("pending.empty")}</Empty>;
  return (
    <>
      <Figures>
        <Figure label={t("pending.pods")} value={<Count value={items.length} />} />
        {countsOf(items).map(([reason, count]) => (
          <Figure
            key={reason}
            label={t(`pending.reasons.${reason}`)}
            value={<Count value={count} />}
          />
        ))}
      </Figures>
      <Card title={t("pending.pods")}>
        <Table
          label={t("pending.pods")}
          rows={items}
          columns={columns()}
          rowKey={(row) => row.pod_uid}
          onOpen={(row) => navigate(pendingLink(row))}
        />
      </Card>
    </>
  );
}

function countsOf(items: readonly Registry.Waiting[]): [Registry.Waiting["reason"], number][] {
  const counts = new Map<Registry.Waiting["reason"], number>();
  for (const one of items) counts.set(one.reason, (counts.get(one.reason) ?? 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1]);
}

/** The waiting pod, with a link to why it waits. */
export function podColumn<Row extends { namespace: string; pod: string }>(): Column<Row> {
  return {
    key: "pod",
    title: t("pending.pod"),
    value: (row) => `${row.namespace}/${row.pod}`,
    cell: (row) => (
      <Link href={pendingLink(row)}>
        {row.namespace}/{row.pod}
      </Link>
    ),
  };
}

function columns(): Column<Registry.Waiting>[] {
  return [
    podColumn(),
    {
      key: "since",
      title: t("pending.since"),
      align: "right",
      value: (row) => -row.since_s,
      cell: (row) => <TimeAgo ms={row.since_s * 1000} />,
    },
    {
      key: "reason",
      title: t("pending.reason"),
      value: (row) => row.reason,
      cell: (row) => <ReasonStatus reason={row.reason} />,
    },
    { key: "text", title: t("pending.text"), value: (row) => row.text },
    {
      key: "attempts",
      title: t("pending.attempts"),
      align: "right",
      value: (row) => row.attempts,
      cell: (row) => <Count value={row.attempts} />,
    },
    {
      key: "decided",
      title: t("pending.decided"),
      align: "right",
      value: (row) => row.decided_s,
      cell: (row) => <TimeAgo ms={row.decided_s * 1000} />,
    },
  ];
}
