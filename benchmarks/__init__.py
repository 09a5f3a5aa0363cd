"""Measurements of fusegen beside eager torch and torch.compile."""
