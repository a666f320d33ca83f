"""A byte-level Mixture-of-Experts language model: data, model, training, checkpoints, generation and plots."""
