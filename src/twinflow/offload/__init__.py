# SPDX-License-Identifier: Apache-2.0
"""The overlap runtime: copies gradients to the host, updates there and copies new weights back while the model runs."""
