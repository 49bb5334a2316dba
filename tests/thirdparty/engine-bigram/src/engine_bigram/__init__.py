"""A bigram language model as an out-of-tree family for Engine."""
