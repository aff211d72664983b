// SPDX-License-Identifier: Apache-2.0

import assert from "node:assert/strict";
import { createServer, type IncomingMessage, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import { test } from "node:test";
import type { ApiError } from "../src/api/client.ts";
import { openStream } from "../src/api/stream.ts";

type Handler = (request: IncomingMessage, response: ServerResponse, number: number) => void;

/** Serve `handler` and let requests without a host go there, as in a browser. */
async function serving(handler: Handler, body: () => Promise<void>): Promise<void> {
  let number = 0;
  const server = createServer((request, response) => {
    number += 1;
    handler(request, response, number);
  });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  const origin = `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
  const original = globalThis.fetch;
  globalThis.fetch = (path, options) => original(`${origin}${path}`, options);
  try {
    await body();
  } finally {
    globalThis.fetch = original;
    server.closeAllConnections();
    await new Promise((resolve) => server.close(resolve));
  }
}

const HEAD = { "content-type": "text/event-stream" };

test("a stream resumes after its last event when the connection breaks", async () => {
  const asked: (string | undefined)[] = [];
  await serving(
    (request, response, number) => {
      asked.push(request.headers["last-event-id"]?.toString());
      response.writeHead(200, HEAD);
      response.write(`id: ${number}\ndata: event ${number}\n\n`);
      if (number === 1) setTimeout(() => response.destroy(), 20);
    },
    async () => {
      const events: string[] = [];
      await new Promise<void>((resolve) => {
        const stream = openStream("/v1/x", {
          since: "0",
          onEvent: (event) => {
            events.push(event.data);
            if (events.length < 2) return;
            stream.close();
            resolve();
          },
        });
      });
      assert.deepEqual(events, ["event 1", "event 2"]);
      assert.deepEqual(asked, ["0", "1"]);
    },
  );
});

test("the event end reconnects, and an unavailable server is asked again", async () => {
  await serving(
    (_, response, number) => {
      if (number === 2) {
        response.writeHead(503).end();
        return;
      }
      response.writeHead(200, HEAD);
      response.write(number === 1 ? "event: end\ndata:\n\n" : "data: again\n\n");
    },
    async () => {
      const data = await new Promise<string>((resolve) => {
        const stream = openStream("/v1/x", {
          onEvent: (event) => {
            stream.close();
            resolve(event.data);
          },
        });
      });
      assert.equal(data, "again");
    },
  );
});

test("a refusal is reported and ends the stream", async () => {
  let requests = 0;
  await serving(
    (_, response) => {
      requests += 1;
      response.writeHead(403).end(JSON.stringify({ error: { code: "forbidden", message: "no" } }));
    },
    async () => {
      const error = await new Promise<ApiError>((resolve) => {
        openStream("/v1/x", { onEvent: () => assert.fail("no event"), onRefused: resolve });
      });
      assert.deepEqual([error.status, error.code], [403, "forbidden"]);
      await new Promise((resolve) => setTimeout(resolve, 700));
      assert.equal(requests, 1);
    },
  );
});
