// SPDX-License-Identifier: Apache-2.0
// See clip_decision.h. The mover (executor_mover.cpp) calls these functions. Threads share no data here.
#include "clip_decision.h"

#include <math.h>

#include <utility>

namespace tf {

constexpr double kClipEps = 1e-6;  // torch.nn.utils.clip_grad_norm_ adds this to the norm

double exact_sum(const std::vector<double>& values) {
  std::vector<double> partials;
  for (double x : values) {
    size_t kept = 0;
    for (double y : partials) {
      if (fabs(x) < fabs(y)) std::swap(x, y);
      double high = x + y, low = y - (high - x);
      if (low != 0.0) partials[kept++] = low;
      x = high;
    }
    partials.resize(kept);
    partials.push_back(x);
  }
  double high = 0.0;
  size_t n = partials.size();
  if (!n) return 0.0;
  high = partials[--n];
  double low = 0.0;
  while (n > 0) {
    double x = high, y = partials[--n];
    high = x + y;
    low = y - (high - x);
    if (low != 0.0) break;
  }
  if (n > 0 && ((low < 0.0 && partials[n - 1] < 0.0) || (low > 0.0 && partials[n - 1] > 0.0))) {
    double y = low * 2.0, x = high + y;
    if (y == x - high) high = x;
  }
  return high;
}

tf_decision decide(const double* norms, int64_t num_norms, const tf_job& job) {
  std::vector<double> squares;
  double plain = 0.0;
  bool is_finite = true;
  for (int64_t i = 0; i < num_norms; ++i) {
    squares.push_back(norms[i] * norms[i]);
    plain += squares.back();
    is_finite = is_finite && isfinite(squares.back());
  }
  double total = is_finite ? exact_sum(squares) : plain;
  double norm = total >= 0 ? sqrt(total) / job.scale : NAN;
  tf_decision found{};
  found.norm = norm;
  if (job.skips && !isfinite(norm)) {
    found.skip = 1;
    return found;
  }
  double clip = 1.0;
  if (!isnan(job.max_norm)) {
    clip = job.max_norm / (norm + kClipEps);
    clip = clip > 1.0 ? 1.0 : clip;  // NaN stays NaN, as in torch
  }
  found.factor = clip / job.scale;
  found.clipped = clip != 1.0;
  return found;
}

}  // namespace tf
