// SPDX-License-Identifier: Apache-2.0
// Whether the control plane keeps up.

import type { Registry } from "../../../generated/api.ts";
import { useGet } from "../../api/use.ts";
import { formatNumber } from "../../format.ts";
import { t, tValue } from "../../i18n.ts";
import { language } from "../../preferences.ts";
import {
  Answered,
  Card,
  type Column,
  Count,
  Empty,
  Figure,
  Figures,
  Memory,
  Page,
  Status,
  Table,
  TimeAgo,
} from "../../ui/index.ts";

const EVERY_S = 5;
const MIB = 1024 * 1024;

export function SystemView() {
  const answer = useGet("/v1/system", { everyS: EVERY_S });
  return (
    <Page title={t("system.title")} intro={t("system.intro")}>
      <Answered answer={answer}>{(data) => <System data={data} />}</Answered>
    </Page>
  );
}

function System({ data }: { data: Registry.SystemView }) {
  const { agents } = data;
  return (
    <>
      <Concerns concerns={data.concerns} />
      <Figures>
        <Figure
          label={t("system.agents")}
          value={<Count value={agents.nodes - agents.silent} />}
          note={t("system.ofNodes", { count: agents.nodes })}
          tone={agents.silent ? "bad" : "ok"}
        />
        <Figure label={t("system.waiting")} value={<Count value={data.waiting} />} />
        <Figure
          label={t("system.quarantined")}
          value={<Count value={data.quarantined.reduce((sum, one) => sum + one.count, 0)} />}
        />
        <Figure label={t("system.deadLetters")} value={<Count value={data.dead_letters} />} />
        <Figure
          label={t("system.generation")}
          value={<Count value={data.config_generation} />}
          note={data.config_problem || undefined}
        />
        <Figure
          label={t("system.version")}
          value={data.version}
          note={t("system.natsVersion", { version: data.bus_version || "–" })}
        />
      </Figures>
      <div class="columns">
        <Replicas rows={data.replicas} answers={data.replica} />
        <Agents agents={agents} />
      </div>
      <Leases rows={data.leases} problem={data.leases_problem} />
      <Streams rows={data.streams} />
      <Consumers rows={data.consumers} problem={data.consumers_problem} />
    </>
  );
}

function Concerns({ concerns }: { concerns: readonly Registry.Concern[] }) {
  return (
    <Card title={t("system.concerns")}>
      {concerns.length ? (
        <ul aria-label={t("system.concerns")}>
          {concerns.map((one) => (
            <li key={`${one.code} ${one.name}`}>
              <Status tone="warn">
                {t(`system.codes.${one.code}`, { count: one.count ?? 0, name: one.name ?? "" })}
              </Status>
            </li>
          ))}
        </ul>
      ) : (
        <p>
          <Status tone="ok">{t("system.keepsUp")}</Status>
        </p>
      )}
    </Card>
  );
}

function Replicas({ rows, answers }: { rows: readonly Registry.ReplicaRow[]; answers: string }) {
  const columns: Column<Registry.ReplicaRow>[] = [
    { key: "service", title: t("system.service"), value: (row) => row.service },
    {
      key: "replica",
      title: t("system.replica"),
      value: (row) => row.replica,
      cell: (row) =>
        row.service === "registry" && row.replica === answers
          ? t("system.answers", { name: row.replica })
          : row.replica,
    },
    {
      key: "last",
      title: t("system.last"),
      align: "right",
      value: (row) => row.last_s,
      cell: (row) => (
        <>
          {tValue("system.messages", row.last)} <TimeAgo ms={row.last_s * 1000} />
        </>
      ),
    },
    {
      key: "decisions",
      title: t("system.decisions"),
      align: "right",
      value: (row) => row.decisions ?? 0,
      cell: (row) => (row.service === "scheduler" ? <Count value={row.decisions ?? 0} /> : "–"),
    },
    {
      key: "median",
      title: t("system.median"),
      align: "right",
      value: (row) => row.decision_median_ms ?? 0,
      cell: (row) => (row.decisions ? <Milliseconds ms={row.decision_median_ms} /> : "–"),
    },
    {
      key: "longest",
      title: t("system.longest"),
      align: "right",
      value: (row) => row.decision_longest_ms ?? 0,
      cell: (row) => (row.decisions ? <Milliseconds ms={row.decision_longest_ms} /> : "–"),
    },
  ];
  return (
    <Card title={t("system.replicas")}>
      <Table
        label={t("system.replicas")}
        rows={rows}
        columns={columns}
        rowKey={(row) => `${row.service} ${row.replica}`}
      />
      <p class="muted">{t("system.replicasNote")}</p>
    </Card>
  );
}

function Milliseconds({ ms }: { ms: number | undefined }) {
  return <span class="amount">{formatNumber(ms ?? 0, language.value, 1)} ms</span>;
}

function Agents({ agents }: { agents: Registry.AgentsRow }) {
  return (
    <Card title={t("system.agentsTitle")}>
      <ul>
        {agents.versions.map((one) => (
          <li key={one.version}>
            {t("system.ofVersion", {
              count: one.agents,
              version: one.version || t("system.unknownVersion"),
            })}
          </li>
        ))}
        {agents.silent_nodes.map((node) => (
          <li key={node}>
            <Status tone="bad">{t("system.silent", { node })}</Status>
          </li>
        ))}
        {agents.unserved.map((one) => (
          <li key={`unserved ${one.node}`}>
            <Status tone="warn">
              {t("system.unserved", { node: one.node, vendors: one.vendors.join(", ") })}
            </Status>
          </li>
        ))}
      </ul>
    </Card>
  );
}

function Leases({ rows, problem }: { rows: readonly Registry.LeaseRow[]; problem: string }) {
  const time = (key: "since_s" | "renewed_s", title: string): Column<Registry.LeaseRow> => ({
    key,
    title,
    align: "right",
    value: (row) => row[key],
    cell: (row) => {
      const at_s = row[key];
      return at_s === null ? "–" : <TimeAgo ms={at_s * 1000} />;
    },
  });
  const columns: Column<Registry.LeaseRow>[] = [
    { key: "name", title: t("system.lease"), value: (row) => row.name },
    { key: "holder", title: t("system.holder"), value: (row) => row.holder || "–" },
    {
      key: "state",
      title: t("system.state"),
      value: (row) => (row.is_expired ? 1 : 0),
      cell: (row) =>
        row.is_expired ? (
          <Status tone="warn">{t("system.expired")}</Status>
        ) : (
          <Status tone="ok">{t("system.held")}</Status>
        ),
    },
    time("since_s", t("system.since")),
    time("renewed_s", t("system.renewed")),
    {
      key: "transitions",
      title: t("system.transitions"),
      align: "right",
      value: (row) => row.transitions,
      cell: (row) => <Count value={row.transitions} />,
    },
  ];
  return (
    <Card title={t("system.leases")}>
      {problem ? (
        <p>
          <Status tone="warn">{t("system.leasesUnknown", { problem })}</Status>
        </p>
      ) : null}
      {rows.length ? (
        <Table
          label={t("system.leases")}
          rows={rows}
          columns={columns}
          rowKey={(row) => row.name}
        />
      ) : (
        <Empty>{t("system.noLeases")}</Empty>
      )}
      <p class="muted">{t("system.leasesNote")}</p>
    </Card>
  );
}

function Streams({ rows }: { rows: readonly Registry.StreamRow[] }) {
  const columns: Column<Registry.StreamRow>[] = [
    { key: "name", title: t("system.stream"), value: (row) => row.name },
    {
      key: "state",
      title: t("system.state"),
      value: (row) => row.problem ?? "",
      cell: (row) => <StreamState row={row} />,
    },
    {
      key: "messages",
      title: t("system.messagesStored"),
      align: "right",
      value: (row) => row.messages,
      cell: (row) => <Count value={row.messages} />,
    },
    {
      key: "size",
      title: t("system.size"),
      align: "right",
      value: (row) => row.size_bytes,
      cell: (row) => <Memory mib={Math.ceil(row.size_bytes / MIB)} />,
    },
    {
      key: "limit",
      title: t("system.limit"),
      align: "right",
      value: (row) => row.limit_bytes,
      cell: (row) =>
        row.limit_bytes > 0 ? <Memory mib={Math.floor(row.limit_bytes / MIB)} /> : "–",
    },
    {
      key: "behind",
      title: t("system.unread"),
      align: "right",
      value: (row) => (row.read_seq === null ? null : Math.max(0, row.last_seq - row.read_seq)),
      cell: (row) =>
        row.read_seq === null ? "–" : <Count value={Math.max(0, row.last_seq - row.read_seq)} />,
    },
    {
      key: "leader",
      title: t("system.leader"),
      value: (row) => row.leader,
      cell: (row) => row.leader || "–",
    },
  ];
  return (
    <Card title={t("system.streams")}>
      <Table label={t("system.streams")} rows={rows} columns={columns} rowKey={(row) => row.name} />
    </Card>
  );
}

function StreamState({ row }: { row: Registry.StreamRow }) {
  if (row.problem) return <Status tone="bad">{row.problem}</Status>;
  if (!row.has_leader) return <Status tone="bad">{t("system.noLeader")}</Status>;
  const behind = row.copies.filter((one) => !one.is_current);
  if (behind.length) {
    return (
      <Status tone="warn">
        {t("system.copiesBehind", { servers: behind.map((one) => one.server).join(", ") })}
      </Status>
    );
  }
  return <Status tone="ok">{t("system.available")}</Status>;
}

function Consumers({ rows, problem }: { rows: readonly Registry.ConsumerRow[]; problem: string }) {
  const count = (
    key: "pending" | "unacknowledged" | "redelivered",
  ): Column<Registry.ConsumerRow> => ({
    key,
    title: t(`system.${key}`),
    align: "right",
    value: (row) => row[key],
    cell: (row) => <Count value={row[key]} />,
  });
  const columns: Column<Registry.ConsumerRow>[] = [
    { key: "stream", title: t("system.stream"), value: (row) => row.stream },
    { key: "name", title: t("system.consumer"), value: (row) => row.name },
    count("pending"),
    count("unacknowledged"),
    count("redelivered"),
  ];
  return (
    <Card title={t("system.consumers")}>
      {problem ? (
        <p>
          <Status tone="warn">{t("system.consumersUnknown", { problem })}</Status>
        </p>
      ) : null}
      {rows.length ? (
        <Table
          label={t("system.consumers")}
          rows={rows}
          columns={columns}
          rowKey={(row) => `${row.stream} ${row.name}`}
        />
      ) : (
        <Empty>{t("system.noConsumers")}</Empty>
      )}
    </Card>
  );
}
