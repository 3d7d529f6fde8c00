"""The engine: forward, backward, step, save and load over the parts it is given."""

from twinflow.engine.core import Engine
from twinflow.engine.loader import ResumableLoader
from twinflow.engine.settings import EngineSettings

__all__ = ["Engine", "EngineSettings", "ResumableLoader"]
