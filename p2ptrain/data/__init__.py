"""The corpus: from text anywhere to numbered sequences of tokens, without any coordination between peers.

``open_corpus`` does it all, in this order: the manifest's tokenizer (``tokenizer``) turns the manifest's text
(``sources``) into one long array of ids, which is kept on disk and memory-mapped (``stream``); arithmetic cuts it into
training and held-out sequences, the same everywhere (``split``). What comes out is a ``Corpus``: sequences by number.

Which numbers a peer reads when is a pure function of (seed, peer id, step) (``assign``, without torch): so no server
hands out data, a peer resumes to the token from its step counter alone, and how much it has covered is known.
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
