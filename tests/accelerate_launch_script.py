# SPDX-License-Identifier: Apache-2.0
"""A script for `accelerate launch`: a run of the Trainer or a loop of Accelerate. Each rank writes what it returns."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import huggingface_ranks_cases as cases
import torch

if __name__ == "__main__":
    work, root, given = sys.argv[1:]
    torch.set_num_threads(1)
    result = getattr(cases, work)(root=root, **json.loads(given))
    Path(root, f"{work}-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(result))
