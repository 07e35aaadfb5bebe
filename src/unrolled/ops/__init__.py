"""One file per operator: registers it with PyTorch, owns its gradient, picks the equation or the core."""
