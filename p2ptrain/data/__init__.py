"""Corpus: text from any source becomes numbered token sequences, without coordination between peers.

``open_corpus`` runs the whole pipeline: the manifest's tokenizer (``tokenizer``) turns the manifest's text
(``sources``) into one array of token ids, cached on disk and memory-mapped (``stream``); arithmetic cuts it into
training and held-out sequences, the same on every machine (``split``). The result is a ``Corpus``: sequences by number.

A corpus of ``dialogues`` is rendered by the run's ``chat_template``, encoded (``chat_tokens``) and packed into rows of
one sequence each (``packing``, ``packed_stream``), which also say what is predicted.

Which sequences a peer reads is a pure function of (seed, peer id, step) (``assign``, without torch). No server hands
out data, a peer resumes at the exact token from its step counter, and its coverage is known.
"""
