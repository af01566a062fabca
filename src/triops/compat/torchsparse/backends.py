"""Switches of torchsparse 2.x: taken, without effect."""

benchmark = False
allow_tf32 = True
allow_fp16 = True
hash_rsv_ratio = 2


def init() -> None:
    """Nothing has to be set up."""
