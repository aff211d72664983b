/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of graphs: what their allocation nodes need, charged when a graph goes to the device. */
#ifndef VGPU_MEMORY_GRAPH_H
#define VGPU_MEMORY_GRAPH_H

#include <stdbool.h>

#include "cuda_abi.h"

/* Around a launch or upload of the graph. begin: false, it does not fit; nothing is charged then. One load for programs
   whose graphs allocate nothing. `charged` goes from one to the other. */
bool memory_graph_begin(CUgraphExec graph, bool *charged);
void memory_graph_end(CUgraphExec graph, bool charged, bool launched);

#endif
