"""Training of sparse language models."""
