"""Quantised tensors, the trainer's quantised forward, and guidance."""
