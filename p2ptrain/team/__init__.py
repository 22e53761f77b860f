"""A peer of several ranks: processes that each train one pipeline stage and own the fragments in it.

The swarm sees one peer. Rank 0, the leader, has the network thread and the identity. Every rank runs the ordinary
``train.learner.Learner`` over its own, shorter flat vector.

::

    leader (rank 0)                                            rank r > 0
      trainer   LeadingTrainer: turn, then Learner  --gloo-->    trainer   follow: turn, then Learner
      network   TeamPayloads, TeamInbox
                  own fragments: LocalShard                  ShardServer, one thread
                  others': RemoteShard          --socket-->    LocalShard

- turn: the record that the leader broadcasts before each inner step, so that all ranks apply the same;
- sharding: which rank owns which fragments;
- shard: one rank's part of every exchange, of donations and of downloads;
- connection, handshake, requests, shard_server, remote_shard: how the leader reaches another rank's shard;
- payloads, inbox: what the network sees;
- trainer: the leader's and the other ranks' loops;
- checkpoints: what the ranks write and load together.
"""
