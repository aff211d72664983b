// SPDX-License-Identifier: Apache-2.0

import type { View } from "../view.ts";
import { QueuesView } from "./queues.tsx";

export const queues: View = {
  name: "queues",
  path: "/queues",
  titleKey: "queues.title",
  icon: "M2 3.5h12M4 8h10M6 12.5h8",
  component: QueuesView,
  needs: "GET /v1/queues",
  group: "tenant",
  order: 20,
};
