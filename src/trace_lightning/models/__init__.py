"""Reading Hugging Face models: where they are, what their sites are, and how to get log-probs from them."""
