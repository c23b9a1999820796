"""The model: pure functions of parameters, with no sight of devices, optimizers or files."""
