// SPDX-License-Identifier: Apache-2.0
// All views, one line each in alphabetical order; console/README.md describes how to add one.

import { capacity } from "./capacity/index.ts";
import { device } from "./device/index.ts";
import { devices } from "./devices/index.ts";
import { events } from "./events/index.ts";
import { fleet } from "./fleet/index.ts";
import { idle } from "./idle/index.ts";
import { pending } from "./pending/index.ts";
import { pressure } from "./pressure/index.ts";
import { queues } from "./queues/index.ts";
import { system } from "./system/index.ts";
import { timemachine } from "./timemachine/index.ts";
import { usage } from "./usage/index.ts";
import type { View } from "./view.ts";
import { whatif } from "./whatif/index.ts";
import { workload } from "./workload/index.ts";

export const views: readonly View[] = [
  capacity, //
  device,
  devices,
  events,
  fleet,
  idle,
  pending,
  pressure,
  queues,
  system,
  timemachine,
  usage,
  whatif,
  workload,
];
