// A persistent pool of threads that share out numbered tasks. The calling thread works too.
#pragma once
#include <stdint.h>

namespace tf {

using TaskFunction = void (*)(void* context, int64_t task);

// Runs function(context, 0 .. num_tasks - 1), each once, in no fixed order; returns when all are done.
// Calls from several threads take turns.
void run_tasks(int64_t num_tasks, TaskFunction function, void* context);

void set_threads(int num_threads);  // the caller counts as one; takes effect at the next run_tasks
int get_threads();

}  // namespace tf
