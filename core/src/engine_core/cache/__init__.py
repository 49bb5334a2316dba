"""What a model remembers between forward calls: one cache a layer, built from data."""

from engine_core.backend import load_mlx

# The modules below import MLX at the top, so whatever has to come before that comes here.
load_mlx()
