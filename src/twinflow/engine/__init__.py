# SPDX-License-Identifier: Apache-2.0
"""The engine: forward, backward, step, save and load for a model with its optimizer, scheduler and data loader."""

from twinflow.engine.base import EngineSettings
from twinflow.engine.core import Engine
from twinflow.engine.loader import ResumableLoader

__all__ = ["Engine", "EngineSettings", "ResumableLoader"]
