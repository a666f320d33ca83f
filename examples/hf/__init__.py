"""What serve_hf_moe.py consists of: a decoder for Hugging Face checkpoints, its loading, generation and training."""
