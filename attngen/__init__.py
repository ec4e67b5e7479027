"""attngen: a compiler that generates specialised attention kernels."""
__version__ = "0.1.0"
