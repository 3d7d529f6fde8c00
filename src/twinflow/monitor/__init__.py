# SPDX-License-Identifier: Apache-2.0
"""Progress display of a run, its metrics on disk, and the HTML report at its end."""
