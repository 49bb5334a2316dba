"""Reading a checkpoint directory: descriptors, headers, index, config, weights."""
