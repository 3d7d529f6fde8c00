"""The engine: forward, backward, step, save and load for a model with its optimizer, scheduler and data loader."""

from twinflow.engine.core import Engine
from twinflow.engine.loader import ResumableLoader
from twinflow.engine.settings import EngineSettings

__all__ = ["Engine", "EngineSettings", "ResumableLoader"]
