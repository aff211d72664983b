// SPDX-License-Identifier: Apache-2.0
// All views, one line each in alphabetical order; console/README.md describes how to add one.

import { capacity } from "./capacity/index.ts";
import { devices } from "./devices/index.ts";
import { fleet } from "./fleet/index.ts";
import type { View } from "./view.ts";

export const views: readonly View[] = [
  capacity, //
  devices,
  fleet,
];
