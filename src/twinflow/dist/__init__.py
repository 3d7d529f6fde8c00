# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks, the collectives for buckets, and the exchange of small values between ranks."""
