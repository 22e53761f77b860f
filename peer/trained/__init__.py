"""Use of a trained model, from a peer's home or a folder in Hugging Face format: evaluate, chat, publish."""
