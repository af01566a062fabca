"""`MinkowskiEngineBackend`, the package of MinkowskiEngine's compiled module."""
