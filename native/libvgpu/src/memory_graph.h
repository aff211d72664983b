/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of graphs: charged for their allocation nodes when a graph goes to the device. */
#ifndef VGPU_MEMORY_GRAPH_H
#define VGPU_MEMORY_GRAPH_H

#include <stdbool.h>

#include "cuda_abi.h"

/* Around a launch or upload of the graph. begin: false, it does not fit; nothing is charged then. One load for programs
   whose graphs allocate nothing. `charged` goes from one to the other. */
bool memory_graph_begin(CUgraphExec graph, bool *charged);
void memory_graph_end(CUgraphExec graph, bool charged, bool launched);

/* A node that allocates has been made: from now on graphs are searched for such nodes when they are instantiated. */
void memory_graph_seen(void);

/* Set the charge for graph memory to what the driver has reserved; true: something was refunded. */
bool memory_graph_settle(int device);

void memory_graph_reset(void);

#endif
