// SPDX-License-Identifier: Apache-2.0
// Capacity that can still be given, and free memory that no share can use.

import { useState } from "preact/hooks";
import type { Registry } from "../../../generated/api.ts";
import { useGet } from "../../api/use.ts";
import { formatMemory } from "../../format.ts";
import { t, tValue } from "../../i18n.ts";
import { language, namespace } from "../../preferences.ts";
import {
  Answered,
  Card,
  type Column,
  Count,
  Empty,
  Figure,
  Figures,
  Memory,
  Meter,
  Page,
  Percent,
  Table,
} from "../../ui/index.ts";
import { type Stranding, strandedBy, strandedOf, totalsOf } from "./sums.ts";

const EVERY_S = 5;

export function CapacityView() {
  const [size, setSize] = useState({ memory_mib: "", core_pct: "" });
  const answer = useGet("/v1/capacity", {
    query: {
      namespace: namespace.value,
      memory_mib: size.memory_mib,
      core_pct: size.memory_mib ? size.core_pct : "",
    },
    everyS: EVERY_S,
  });
  return (
    <Page
      title={t("capacity.title")}
      intro={t("capacity.intro")}
      actions={<SizeForm onSize={setSize} />}
    >
      <Answered answer={answer}>{({ items }) => <Capacity models={items} />}</Answered>
    </Page>
  );
}

function SizeForm(props: { onSize: (size: { memory_mib: string; core_pct: string }) => void }) {
  return (
    <form
      class="inline-form"
      onSubmit={(event) => {
        event.preventDefault();
        const form = new FormData(event.currentTarget);
        props.onSize({
          memory_mib: String(form.get("memory") ?? ""),
          core_pct: String(form.get("core") ?? ""),
        });
      }}
    >
      <label>
        {t("capacity.memory")}
        <input name="memory" type="number" min="1" step="1" class="short" />
      </label>
      <label>
        {t("capacity.core")}
        <input name="core" type="number" min="0" max="100" step="1" class="short" />
      </label>
      <button type="submit" class="button">
        {t("capacity.count")}
      </button>
    </form>
  );
}

function Capacity({ models }: { models: readonly Registry.ModelCapacity[] }) {
  if (!models.length) return <Empty>{t("capacity.empty")}</Empty>;
  const totals = totalsOf(models);
  const causes = strandedBy(models, (model) =>
    model.stranded.map((one) => ({ name: one.cause, memoryMib: one.memory_mib })),
  );
  const holders = strandedBy(models, (model) =>
    model.stranded_by.map((one) => ({ name: one.namespace, memoryMib: one.memory_mib })),
  );
  return (
    <>
      <Figures>
        <Figure
          label={t("capacity.devices")}
          value={<Count value={totals.devices} />}
          note={t("capacity.offering", { count: totals.offering })}
        />
        <Figure label={t("capacity.total")} value={<Memory mib={totals.capacityMib} />} />
        <Figure label={t("capacity.free")} value={<Memory mib={totals.freeMib} />} />
        <Figure
          label={t("capacity.stranded")}
          value={<Memory mib={totals.strandedMib} />}
          tone={totals.strandedMib ? "warn" : "neutral"}
        />
      </Figures>
      <Card title={t("capacity.models")}>
        <Table
          label={t("capacity.models")}
          rows={models}
          columns={columnsOf(models)}
          rowKey={(model) => `${model.vendor} ${model.model}`}
        />
      </Card>
      <div class="columns">
        <Card title={t("capacity.byCause")}>
          <StrandedTable
            label={t("capacity.byCause")}
            column={t("capacity.cause")}
            rows={causes}
            nameOf={(name) => tValue("capacity.causes", name)}
          />
        </Card>
        <Card title={t("capacity.byNamespace")}>
          <StrandedTable
            label={t("capacity.byNamespace")}
            column={t("capacity.namespace")}
            rows={holders}
            nameOf={(name) => name || t("capacity.otherNamespaces")}
          />
        </Card>
      </div>
    </>
  );
}

function columnsOf(models: readonly Registry.ModelCapacity[]): Column<Registry.ModelCapacity>[] {
  const fits = models[0]?.fits ?? [];
  return [
    { key: "model", title: t("capacity.model"), value: (model) => model.model },
    {
      key: "offering",
      title: t("capacity.devicesOffering"),
      align: "right",
      value: (model) => model.devices_offering,
      cell: (model) => (
        <>
          <Count value={model.devices_offering} /> / <Count value={model.devices} />
        </>
      ),
    },
    {
      key: "largest",
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
    { key: "on", title: t("capacity.largestOn"), value: (model) => model.largest_on },
    ...fits.map((fit, index) => ({
      key: `fit ${fit.size}`,
      title: t("capacity.fit", { size: fit.size === "asked" ? t("capacity.asked") : fit.size }),
      align: "right" as const,
      value: (model: Registry.ModelCapacity) => model.fits[index]?.count,
      cell: (model: Registry.ModelCapacity) => <Count value={model.fits[index]?.count} />,
    })),
    {
      key: "free",
      title: t("capacity.free"),
      value: (model) => model.free_mib,
      cell: (model) => (
        <Meter
          label={t("capacity.free")}
          isLabelHidden
          value={model.free_mib}
          most={model.capacity_mib}
          text={formatMemory(model.free_mib, language.value)}
        />
      ),
    },
    {
      key: "stranded",
      title: t("capacity.stranded"),
      align: "right",
      value: strandedOf,
      cell: (model) => <Memory mib={strandedOf(model)} />,
    },
    {
      key: "foreign",
      title: t("capacity.foreign"),
      align: "right",
      value: (model) => model.foreign_mib,
      cell: (model) => <Memory mib={model.foreign_mib} />,
    },
    {
      key: "burst",
      title: t("capacity.burst"),
      align: "right",
      value: (model) => model.burst_mib,
      cell: (model) => <Memory mib={model.burst_mib} />,
    },
  ];
}

function StrandedTable(props: {
  label: string;
  column: string;
  rows: readonly Stranding[];
  nameOf: (name: string) => string;
}) {
  if (!props.rows.length) return <Empty>{t("capacity.nothingStranded")}</Empty>;
  const columns: Column<Stranding>[] = [
    { key: "name", title: props.column, value: (row) => props.nameOf(row.name) },
    {
      key: "memory",
      title: t("capacity.strandedMemory"),
      align: "right",
      value: (row) => row.memoryMib,
      cell: (row) => <Memory mib={row.memoryMib} />,
    },
    { key: "models", title: t("capacity.model"), value: (row) => row.models.join(", ") },
  ];
  return (
    <Table label={props.label} rows={props.rows} columns={columns} rowKey={(row) => row.name} />
  );
}
