// SPDX-License-Identifier: Apache-2.0
// A page with the parts of src/ui, for tests/console/test_parts.py.

import "uplot/dist/uPlot.min.css";
import "../src/style.css";
import { render } from "preact";
import { useState } from "preact/hooks";
import { Card, Chart, type Column, Dialog, Meter, Status, Table } from "../src/ui/index.ts";

type Row = { name: string; memoryMib: number };

const ROWS = Array.from({ length: 40_000 }, (_, index) => ({
  name: `node-${index}`,
  memoryMib: (index * 7_919) % 40_960,
}));
const COLUMNS: Column<Row>[] = [
  { key: "name", title: "Name", value: (row) => row.name },
  { key: "memory", title: "Memory", align: "right", value: (row) => row.memoryMib },
];
const TIMES = Array.from({ length: 200 }, (_, index) => 1_700_000_000 + index * 60);
const SERIES = [
  { label: "used", values: TIMES.map((_, index) => Math.round(200 + 100 * Math.sin(index / 9))) },
  { label: "peak", values: TIMES.map((_, index) => (index % 50 ? index : null)) },
];

function Parts() {
  const [opened, setOpened] = useState<Row>();
  const [confirmed, setConfirmed] = useState("");
  const close = () => setOpened(undefined);
  return (
    <main class="content">
      <h1>Parts</h1>
      <p id="confirmed">{confirmed}</p>
      <Card title="Nodes">
        <Table
          label="Nodes"
          rows={ROWS}
          columns={COLUMNS}
          rowKey={(row) => row.name}
          onOpen={setOpened}
        />
      </Card>
      <Card title="Use">
        <Chart label="Memory" times={TIMES} series={SERIES} format={(value) => `${value} MiB`} />
        <Meter label="Share" value={3} most={4} text="3 of 4" tone="warn" />
        {(["ok", "warn", "bad", "info", "neutral"] as const).map((tone) => (
          <Status key={tone} tone={tone}>
            {tone}
          </Status>
        ))}
      </Card>
      {opened ? (
        <Dialog
          title={opened.name}
          confirm="Cordon"
          isDanger
          onClose={close}
          onConfirm={() => {
            setConfirmed(opened.name);
            close();
          }}
        >
          <p>Cordon this node?</p>
        </Dialog>
      ) : null}
    </main>
  );
}

render(<Parts />, document.body);
