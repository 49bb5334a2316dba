"""What a model remembers between forward calls: one cache a layer, built from data."""
