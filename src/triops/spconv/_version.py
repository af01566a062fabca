"""The version of spconv whose interface these modules follow; programs ask for it."""

VERSION = "2.3.8"
NUMBERS = [int(part) for part in VERSION.split(".")]
