"""The engine: forward, backward, step, save and load over the parts it is given."""

from twinflow.engine.core import Engine, EngineSettings
from twinflow.engine.loader import ResumableLoader

__all__ = ["Engine", "EngineSettings", "ResumableLoader"]
