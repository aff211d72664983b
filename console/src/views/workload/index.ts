// SPDX-License-Identifier: Apache-2.0

import type { View } from "../view.ts";
import { WorkloadView } from "./workload.tsx";

export const workload: View = {
  name: "workload",
  path: "/workloads/:namespace?/:pod?",
  titleKey: "workload.title",
  icon: "M2 3h12v10H2zM2 7h12M5 10h3",
  component: WorkloadView,
  needs: "GET /v1/allocations",
  group: "tenant",
  order: 10,
};
