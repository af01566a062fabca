"""`MinkowskiEngine.modules`: blocks of residual networks."""
