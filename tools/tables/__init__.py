"""The tables of docs/performance.md, a module for each measuring program; tools/performance.py puts them together."""
