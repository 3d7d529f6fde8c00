// SPDX-License-Identifier: Apache-2.0
// Computes the clipping decision from the norms of all buckets, with pure functions, without threads or state. They
// give the same bits as `decide` in offload/clipping.py, so that a step does not depend on where the decision is made.
#pragma once
#include <stdint.h>

#include <vector>

#include "api.h"

namespace tf {

// The exactly rounded sum, as in Python's math.fsum (Shewchuk's partial sums, rounded half to even at the end).
double exact_sum(const std::vector<double>& values);

tf_decision decide(const double* norms, int64_t num_norms, const tf_job& job);

}  // namespace tf
