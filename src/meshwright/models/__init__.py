"""Models as plain modules without parallel code, their initial weights, Hugging Face files."""

from meshwright.models.cache import KVCache
from meshwright.models.init import init_model, init_parameter
from meshwright.models.transformer import Transformer, build_model

__all__ = ["KVCache", "Transformer", "build_model", "init_model", "init_parameter"]
