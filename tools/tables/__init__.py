"""The tables of docs/performance.md, a room for each program that measures; tools/performance.py puts them together."""
