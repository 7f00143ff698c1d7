"""Interfaces of other implementations of Native Sparse Attention on the operations of this one."""
