"""The format of Hugging Face checkpoints: files, names of each model family, quantised tensors, shards."""
