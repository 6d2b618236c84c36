"""samebits: RL post-training in which trainer and serving engine compute with the same bits."""

__version__ = "0.1.0"
