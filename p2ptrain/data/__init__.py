"""An author's text: read once, tokenized, divided into training and held-out shards.

``own_text`` creates a run. Its sources (``author_text``) are read from any position (``reading``; rows of jsonl and
parquet in ``rows``, data sets in ``hub``) and encoded on all cores (``tokenizing``, ``stream``, ``tokenizer``);
``parts`` decides what is held out. Dialogues are rendered by a chat template (``chat_template``, ``chat_tokens``)
and packed into rows of one sequence each (``packed_stream``). ``shard_text`` puts this together,
``unfinished`` lets a stopped one go on, ``checking`` looks at the result before it is signed.

Peers use little of this: files by digest (``file_store``), and tokenizer and template to show text.
"""
