// SPDX-License-Identifier: Apache-2.0
// A persistent pool of threads that process numbered tasks. The calling thread works too.
#pragma once
#include <stdint.h>

namespace tf {

using TaskFunction = void (*)(void* context, int64_t task);

// Runs function(context, i) once for each i below num_tasks, in no fixed order. Returns when all are done. Calls from
// several threads take turns.
void run_tasks(int64_t num_tasks, TaskFunction function, void* context);

void set_threads(int num_threads);  // includes the caller; takes effect at the next run_tasks
int get_threads();

}  // namespace tf
