"""What an engine says about itself: messages, ledger, mirror, sources. No torch, no Qt."""
