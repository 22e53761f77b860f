"""Use of a trained model, in a peer's home: evaluate, chat, publish."""
