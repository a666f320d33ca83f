"""Parts of serve_hf_moe.py: a decoder for Hugging Face checkpoints, its loading, generation and training."""
