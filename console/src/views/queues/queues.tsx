// SPDX-License-Identifier: Apache-2.0
// Queues with their use, the pods that wait in them, and what a namespace may still use.

import type { Registry, Scheduler } from "../../../generated/api.ts";
import { useGet } from "../../api/use.ts";
import { t } from "../../i18n.ts";
import { namespace } from "../../preferences.ts";
import {
  Answered,
  Card,
  type Column,
  Count,
  Empty,
  Memory,
  Meter,
  Page,
  Percent,
  Status,
  Table,
  TimeAgo,
} from "../../ui/index.ts";
import { podColumn } from "../pending/pending.tsx";
import {
  amountsText,
  amountText,
  estimateText,
  ReasonStatus,
  resourceText,
} from "../pending/texts.tsx";

const EVERY_S = 5;

export function QueuesView() {
  const mine = namespace.value;
  const queues = useGet("/v1/queues", { query: { namespace: mine }, everyS: EVERY_S });
  return (
    <Page title={t("queues.title")} intro={t("queues.intro")}>
      {mine ? <StillAllowed namespace={mine} /> : <p class="muted">{t("queues.choose")}</p>}
      <Answered answer={queues}>
        {({ items, problem, waiting }) => (
          <>
            {problem ? (
              <p class="banner">
                <Status tone="warn">{t("queues.notInForce", { problem })}</Status>
              </p>
            ) : null}
            <Tree rows={items} />
            <WaitingPods rows={waiting ?? []} />
          </>
        )}
      </Answered>
      <Quotas namespace={mine} />
    </Page>
  );
}

function StillAllowed({ namespace: mine }: { namespace: string }) {
  const quotas = useGet("/v1/quotas", { query: { namespace: mine }, everyS: EVERY_S });
  const capacity = useGet("/v1/capacity", { query: { namespace: mine }, everyS: EVERY_S });
  const columns: Column<Scheduler.HeadroomRow>[] = [
    { key: "resource", title: t("queues.resource"), value: (row) => resourceText(row.resource) },
    {
      key: "amount",
      title: t("queues.still"),
      align: "right",
      value: (row) => row.amount ?? Number.POSITIVE_INFINITY,
      cell: (row) =>
        row.amount === null ? t("queues.noLimit") : amountText(row.resource, row.amount),
    },
    { key: "text", title: t("queues.limitedBy"), value: (row) => row.text ?? "" },
  ];
  return (
    <div class="columns">
      <Card title={t("queues.stillTitle", { namespace: mine })}>
        <Answered answer={quotas}>
          {({ headroom }) =>
            headroom?.length ? (
              <Table
                label={t("queues.stillTitle", { namespace: mine })}
                rows={headroom}
                columns={columns}
                rowKey={(row) => row.resource}
              />
            ) : (
              <Empty>{t("queues.unlimited")}</Empty>
            )
          }
        </Answered>
      </Card>
      {capacity.data ? (
        <Card title={t("queues.largest")}>
          <Largest models={capacity.data.items} />
        </Card>
      ) : null}
    </div>
  );
}

function Largest({ models }: { models: readonly Registry.ModelCapacity[] }) {
  if (!models.length) return <Empty>{t("capacity.empty")}</Empty>;
  return (
    <Table
      label={t("queues.largest")}
      rows={models}
      rowKey={(model) => `${model.vendor} ${model.model}`}
      columns={[
        { key: "model", title: t("capacity.model"), value: (model) => model.model },
        {
          key: "memory",
          title: t("capacity.largest"),
          align: "right",
          value: (model) => model.largest_mib,
          cell: (model) => <Memory mib={model.largest_mib} />,
        },
        {
          key: "core",
          title: t("capacity.largestCore"),
          align: "right",
          value: (model) => model.largest_core_pct,
          cell: (model) => <Percent pct={model.largest_core_pct} />,
        },
      ]}
    />
  );
}

function Tree({ rows }: { rows: readonly Scheduler.QueueRow[] }) {
  if (!rows.length) return <Empty>{t("queues.none")}</Empty>;
  const columns: Column<Scheduler.QueueRow>[] = [
    {
      key: "queue",
      title: t("queues.queue"),
      isSortable: false,
      value: (row) => row.queue,
      cell: (row) => (
        <span style={{ paddingInlineStart: `${(row.depth - 1) * 16}px` }}>{row.queue}</span>
      ),
    },
    {
      key: "resource",
      title: t("queues.resource"),
      isSortable: false,
      value: (row) => resourceText(row.resource),
    },
    {
      key: "used",
      title: t("queues.used"),
      isSortable: false,
      value: (row) => row.used,
      cell: (row) => (
        <Meter
          label={t("queues.usedOf", { queue: row.queue })}
          isLabelHidden
          value={row.used}
          most={row.limit ?? Math.max(row.guaranteed, row.used)}
          text={amountText(row.resource, row.used)}
          tone={row.borrowed ? "warn" : "ok"}
        />
      ),
    },
    amountColumn("guaranteed", t("queues.guaranteed"), (row) => row.guaranteed),
    amountColumn("borrowed", t("queues.borrowed"), (row) => row.borrowed),
    amountColumn("limit", t("queues.limit"), (row) => row.limit),
    {
      key: "weight",
      title: t("queues.weight"),
      align: "right",
      isSortable: false,
      value: (row) => row.borrow_weight ?? 1,
    },
    {
      key: "waiting",
      title: t("queues.waiting"),
      align: "right",
      isSortable: false,
      value: (row) => row.waiting ?? 0,
      cell: (row) => <Count value={row.waiting ?? 0} />,
    },
  ];
  return (
    <Card title={t("queues.tree")}>
      <Table
        label={t("queues.tree")}
        rows={rows}
        columns={columns}
        rowKey={(row) => `${row.queue} ${row.resource}`}
      />
    </Card>
  );
}

function amountColumn(
  key: string,
  title: string,
  value: (row: Scheduler.QueueRow) => number | null | undefined,
): Column<Scheduler.QueueRow> {
  return {
    key,
    title,
    align: "right",
    isSortable: false,
    value,
    cell: (row) => {
      const amount = value(row);
      return amount === null || amount === undefined ? "–" : amountText(row.resource, amount);
    },
  };
}

function WaitingPods({ rows }: { rows: readonly Scheduler.WaitingRow[] }) {
  const columns: Column<Scheduler.WaitingRow>[] = [
    {
      key: "queue",
      title: t("queues.queue"),
      value: (row) => row.queue,
      cell: (row) => row.queue || t("queues.noQueue"),
    },
    { key: "position", title: t("queues.position"), align: "right", value: (row) => row.position },
    podColumn(),
    {
      key: "since",
      title: t("pending.since"),
      align: "right",
      value: (row) => -row.created_s,
      cell: (row) => <TimeAgo ms={row.created_s ? row.created_s * 1000 : null} />,
    },
    {
      key: "reason",
      title: t("pending.reason"),
      value: (row) => row.reason ?? "",
      cell: (row) => <ReasonStatus reason={row.reason} />,
    },
    { key: "ahead", title: t("queues.ahead"), value: (row) => amountsText(row.ahead) || "–" },
    {
      key: "estimate",
      title: t("pending.estimate"),
      value: (row) => row.estimate.wait_s ?? Number.POSITIVE_INFINITY,
      cell: (row) => estimateText(row.estimate),
    },
  ];
  return (
    <Card title={t("pending.pods")}>
      {rows.length ? (
        <Table
          label={t("pending.pods")}
          rows={rows}
          columns={columns}
          rowKey={(row) => row.pod_uid}
        />
      ) : (
        <Empty>{t("pending.empty")}</Empty>
      )}
      <p class="muted">{t("queues.positionNote")}</p>
    </Card>
  );
}

function Quotas({ namespace: mine }: { namespace: string }) {
  const answer = useGet("/v1/quotas", { query: { namespace: mine }, everyS: EVERY_S });
  const columns: Column<Scheduler.QuotaRow>[] = [
    { key: "namespace", title: t("shell.namespace"), value: (row) => row.namespace },
    { key: "quota", title: t("queues.quota"), value: (row) => row.quota },
    { key: "key", title: t("queues.key"), value: (row) => row.key },
    {
      key: "used",
      title: t("queues.used"),
      value: (row) => row.used,
      cell: (row) => (
        <Meter
          label={t("queues.usedOf", { queue: row.quota })}
          isLabelHidden
          value={row.used}
          most={row.limit}
          text={amountText(row.resource, row.used)}
          tone={row.used >= row.limit ? "bad" : "ok"}
        />
      ),
    },
    {
      key: "limit",
      title: t("queues.limit"),
      align: "right",
      value: (row) => row.limit,
      cell: (row) =>
        row.problem ? (
          <Status tone="bad">{row.problem}</Status>
        ) : (
          amountText(row.resource, row.limit)
        ),
    },
  ];
  return (
    <Card title={t("queues.quotas")}>
      <Answered answer={answer}>
        {({ items }) =>
          items.length ? (
            <Table
              label={t("queues.quotas")}
              rows={items}
              columns={columns}
              rowKey={(row) => `${row.namespace} ${row.quota} ${row.key}`}
            />
          ) : (
            <Empty>{t("queues.noQuota")}</Empty>
          )
        }
      </Answered>
    </Card>
  );
}
