"""Multi-head latent attention (MLA, arXiv 2405.04434): layers whose cache holds latents in place of keys and values."""
