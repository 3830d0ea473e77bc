"""The parts of `sentence_embeddings.py`: model, weights, tokens, sentences, formats."""
