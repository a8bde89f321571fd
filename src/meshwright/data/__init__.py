"""Corpora, tokenizers, the indexed store and the sampler. Numpy only; never imports torch."""

from meshwright.data.dataset import Blend, BlendSampler, Dataset, open_data, refuse_changed
from meshwright.data.sampler import IGNORE, PADDING, Rows, Sampler, StepPosition, WholeSampler
from meshwright.data.store import Store, open_store, verify
from meshwright.data.streamed import StreamedDataset, StreamPosition, StreamSampler
from meshwright.data.tokenizers import Tokenizer, load_tokenizer, train_bpe
from meshwright.data.writer import prepare

__all__ = [
    "IGNORE",
    "PADDING",
    "Blend",
    "BlendSampler",
    "Dataset",
    "Rows",
    "Sampler",
    "StepPosition",
    "Store",
    "StreamPosition",
    "StreamSampler",
    "StreamedDataset",
    "Tokenizer",
    "WholeSampler",
    "load_tokenizer",
    "open_data",
    "open_store",
    "prepare",
    "refuse_changed",
    "train_bpe",
    "verify",
]
