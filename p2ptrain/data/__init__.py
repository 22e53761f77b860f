"""Corpus: text from any source becomes numbered token sequences, without coordination between peers.

``open_corpus`` runs the whole pipeline: the manifest's tokenizer (``tokenizer``) turns the manifest's text
(``sources``) into one array of token ids, cached on disk and memory-mapped (``stream``); arithmetic cuts it into
training and held-out sequences, the same on every machine (``split``). The result is a ``Corpus``: sequences by number.

Which sequences a peer reads is a pure function of (seed, peer id, step) (``assign``, without torch). No server hands
out data, a peer resumes at the exact token from its step counter, and its coverage is known.
"""

from p2ptrain.data import assign
from p2ptrain.data.corpus import Corpus, has_stream, most_stream_bytes, open_corpus
from p2ptrain.data.split import Split, split_stream
from p2ptrain.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "ByteTokenizer",
    "Corpus",
    "JsonTokenizer",
    "Split",
    "Tokenizer",
    "assign",
    "has_stream",
    "load_tokenizer",
    "most_stream_bytes",
    "open_corpus",
    "split_stream",
]
