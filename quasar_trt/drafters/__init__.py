"""Who proposes tokens for the verifier to score; `registry` has them by name."""
